"""Check of the folders of checkpoint.resume_from and init_from before a run builds anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graphmoe.checkpoint import CHECKPOINTS, CheckpointError, saved_steps
from graphmoe.checkpoint.store import check_fit
from graphmoe.config.schema import ConfigError, RunConfig
from graphmoe.model.build import build_model
from graphmoe.plan.plan import DTYPES
from graphmoe.run.weights import check_weights, explained_mismatch


def check_start(config: RunConfig, own_folder: Path | None = None) -> None:
    """Refuse a folder to start from that is not there, of another kind, damaged or of another model.

    Sizes are read, no contents: what only they show, the start itself finds. A run whose own folder has a
    checkpoint starts from that. *Raises* ConfigError with the key.
    """
    checkpoint, model = config.checkpoint, config.model
    if own_folder is not None and saved_steps(own_folder / CHECKPOINTS):
        return
    try:
        if checkpoint.resume_from:
            with named_source("resume_from", checkpoint.resume_from):
                folder = Path(checkpoint.resume_from)
                ours = build_model(model, device="meta", dtype=DTYPES[config.precision.compute])
                with explained_mismatch(folder, model):
                    check_fit(folder, {"model": ours.state_dict()}, partial=False)
        if checkpoint.init_from:
            with named_source("init_from", checkpoint.init_from):
                check_weights(Path(checkpoint.init_from), model)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def named_source(key: str, folder: str | None) -> Iterator[None]:
    """Put the key that named a folder, if one did, before what is wrong with it."""
    try:
        yield
    except (CheckpointError, ConfigError) as error:
        if not folder:
            raise
        raise type(error)(f"checkpoint.{key}={folder}: {error}") from error
