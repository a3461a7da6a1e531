"""The errors that saving and loading raise for reasons outside of the program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read, or fitted to the state it is loaded into."""


class MismatchError(CheckpointError):
    """A whole checkpoint whose entries are not those of the state it is loaded into."""

    @classmethod
    def of(cls, path: Path, lines: Sequence[str]) -> MismatchError:
        """The error that lists the entries, one by line."""
        listed = "\n  ".join(lines)
        return cls(f"{path} does not fit the state in {len(lines)} entries:\n  {listed}")
