"""Whether a checkpoint fits a state, seen before anything is built: names, shapes and sizes, no contents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from graphmoe.checkpoint.entries import differences, flatten
from graphmoe.checkpoint.errors import CheckpointError, MismatchError
from graphmoe.checkpoint.folders import checkpoints_in, why_none
from graphmoe.checkpoint.manifest import damage, require_named
from graphmoe.checkpoint.metadata_file import file_names, read_metadata


def check_fit(path: Path, state: dict[str, Any], *, partial: bool) -> None:
    """Raise what loading the newest checkpoint into ``state`` would; its tensors may be on the meta device.

    path: a run's folder, its ``checkpoints``, or one checkpoint. Sections of the checkpoint that ``state``
    has not are let by. No collective. *Raises* CheckpointError.
    """
    found = checkpoints_in(path)
    if not found:
        raise CheckpointError(why_none(path))
    reasons = [damage(each, contents=False) for each in found]
    whole = next((each for each, lines in zip(found, reasons, strict=True) if not lines), None)
    if whole is None:
        lines = "; ".join(line for lines in reasons for line in lines)
        raise CheckpointError(f"{path} has damaged checkpoints only: {lines}")
    saved = read_metadata(whole)
    require_named(whole, file_names(saved))
    sections = {
        name: entry
        for name, entry in saved.state_dict_metadata.items()
        if partial or name.partition(".")[0] in state
    }
    wanted = flatten(state)
    report = differences(wanted, Metadata(sections), wanted.names, partial=partial)
    if report:
        raise MismatchError.of(whole, report)
