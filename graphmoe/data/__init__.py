"""Tokens for training: sources, packing to the sequence length, and the loader (docs/data.md)."""

from graphmoe.data.corpus import Corpus
from graphmoe.data.errors import DataError
from graphmoe.data.loader import Loader, first_batches
from graphmoe.data.samples import Samples
from graphmoe.data.sources import open_data

__all__ = ["Corpus", "DataError", "Loader", "Samples", "first_batches", "open_data"]
