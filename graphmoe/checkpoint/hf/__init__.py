"""Models in the format of the Hugging Face hub."""

from graphmoe.checkpoint.hf.folder import load_hf, save_hf

__all__ = ["load_hf", "save_hf"]
