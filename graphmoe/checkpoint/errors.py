"""The errors that saving and loading raise for reasons outside of the program."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read, or fitted to the state it is loaded into."""


class MismatchError(CheckpointError):
    """A whole checkpoint whose entries are not those of the state it is loaded into."""
