"""Reader of stored runs (resolved.yaml); checks of the tokenizer of the weights that a run starts from."""

import enum
import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from graphmoe.checkpoint import CheckpointError
from graphmoe.checkpoint.folders import locate, run_of, saved_steps, why_none
from graphmoe.config.arguments import near_path
from graphmoe.config.schema import CheckpointConfig, ConfigError, DataConfig, RunConfig
from graphmoe.config.untrusted import read_yaml
from graphmoe.data.tokenizer import (
    end_of_document,
    find_tokenizer,
    load_tokenizer,
    num_ids,
    tokenizer_hash,
    usual_end,
)
from graphmoe.run.files import CONFIG_FILE, TOKENIZER_FILE

log = logging.getLogger(__name__)

META_FILE = "weights.json"  # only in folders of weights in our format


class WeightsMeta(msgspec.Struct):
    """Fields read from weights.json."""

    format: str
    model: str
    token_ids: dict[str, int | list[int] | None] | None = None


class StoredPrecision(msgspec.Struct):
    compute: str | None = None


class StoredData(msgspec.Struct):
    source: str | None = None
    tokenizer: str | None = None
    eod_token: str | None = None
    chat_template: str | None = None
    document_mask: bool = False


class StoredCheckpoint(msgspec.Struct):
    init_from: str | None = None
    resume_from: str | None = None
    other_tokenizer: bool = False
    export: str | None = None


class StoredTrain(msgspec.Struct):
    micro_batch_size: int | None = None


class StoredOptim(msgspec.Struct):
    master_dtype: str = "fp32"


class StoredRun(msgspec.Struct):
    """Keys that are read from a stored run."""

    model: dict[str, Any]
    train: StoredTrain = msgspec.field(default_factory=StoredTrain)
    precision: StoredPrecision = msgspec.field(default_factory=StoredPrecision)
    optim: StoredOptim = msgspec.field(default_factory=StoredOptim)
    data: StoredData = msgspec.field(default_factory=StoredData)
    checkpoint: StoredCheckpoint = msgspec.field(default_factory=StoredCheckpoint)


def config_file(folder: Path) -> Path | None:
    """Return a run's resolved.yaml, given its folder, ``checkpoints`` or one checkpoint; else None."""
    path = run_of(folder.absolute()) / CONFIG_FILE
    return path if path.is_file() else None


def read_stored_run(folder: Path) -> tuple[Path, StoredRun]:
    """Return path and content of a run's resolved.yaml. *Raises* ConfigError."""
    path = config_file(folder)
    if path is None:
        raise ConfigError(f"{folder} is not the folder of a run: it has no {CONFIG_FILE}{near_path(folder)}")
    return path, read_yaml(path, StoredRun)


def run_tokenizer(folder: Path) -> tuple[Path, int | None, str | None]:
    """Return a run's tokenizer.json (may be missing), and id and text of its end-of-document token.

    The file that the configuration names counts only if the run's own copy is equal.
    """
    config, run = read_stored_run(folder)
    own, data = config.with_name(TOKENIZER_FILE), run.data
    named = find_tokenizer(data.tokenizer, fetch=False) if data.tokenizer else own
    path = next((each for each in (own, named) if each.is_file()), own)
    if not path.is_file():
        return path, None, None
    tokenizer, name = load_tokenizer(path), data.eod_token
    if path == own and named != own and named.is_file():
        with suppress(ConfigError):  # a file of the reader's with the same name
            path = named if load_tokenizer(named).to_str() == tokenizer.to_str() else own
    end = usual_end(tokenizer, path) if name is None else end_of_document(tokenizer, path, name)
    return path, end, None if end is None else tokenizer.id_to_token(end)


def base_folder(run: Path) -> str | None:
    """Return the Hugging Face folder whose weights a run started from."""
    start = read_stored_run(run)[1].checkpoint.init_from
    return str(Path(start).absolute()) if start and kind_if_any(Path(start)) is FolderKind.hf else None


class FolderKind(enum.Enum):
    hf = "Hugging Face folder"
    graphmoe = "graphmoe weights"
    run = "run folder"


def kind_of(folder: Path) -> FolderKind:
    """Return a folder's kind. *Raises* ConfigError."""
    if kind := kind_if_any(folder):
        return kind
    why = "holds no weights" if folder.is_dir() else "is not a folder"
    raise ConfigError(
        f"{folder} {why}; give a Hugging Face folder (config.json), a folder that "
        f"graphmoe.convert wrote ({META_FILE}), or a run's folder ({CONFIG_FILE}){near_path(folder)}"
    )


def kind_if_any(folder: Path) -> FolderKind | None:
    """Return a folder's kind by its files; weights take precedence over a run."""
    if (folder / META_FILE).is_file():
        return FolderKind.graphmoe
    if (folder / "config.json").is_file():
        return FolderKind.hf
    return FolderKind.run if config_file(folder) else None


def missing_start(checkpoint: CheckpointConfig) -> Iterator[str]:
    """Yield an error message if the folder to start from is unusable; checks names of files only."""
    if (start := _start(checkpoint)) is None:
        return
    key, folder = start
    try:
        if checkpoint.resume_from or kind_of(folder) is FolderKind.run:
            places, step = locate(folder)
            if step is None and not saved_steps(places):
                yield f"{key}={folder}: {why_none(folder)}"
    except ConfigError as error:
        yield f"{key}={folder}: {error}"


def with_start_tokenizer(config: RunConfig) -> RunConfig:
    """Return the configuration, with the tokenizer of the folder to start from if none was chosen."""
    data, start = config.data, _start(config.checkpoint)
    if start is None or data.tokenizer is not None or data.source_facts.ignores("tokenizer"):
        return config
    _, folder = start
    if not os.path.isfile(path := _tokenizer_in(folder)):  # also False for names that no file can have
        return config
    end = None
    if config_file(folder):
        stored = read_stored_run(folder)[1].data
        if data.source == stored.source == "stdlib" and stored.tokenizer is None:
            return config
        end = run_tokenizer(folder)[2]
    return replace(config, data=replace(data, tokenizer=str(path), eod_token=data.eod_token or end))


def refuse_other_tokenizer(
    checkpoint: CheckpointConfig, data: DataConfig, tokenizer: Tokenizer | None
) -> None:
    """Raise ConfigError if the data's token ids are not those of the weights to start from."""
    start = _start(checkpoint)
    if start is None or tokenizer is None or checkpoint.other_tokenizer:
        return
    key, folder = start
    if not (path := _tokenizer_in(folder)).is_file():
        _warn_without_tokenizer(key, folder)
        return
    theirs = load_tokenizer(path, key)
    ours_by_token, theirs_by_token = (each.get_vocab(with_added_tokens=True) for each in (tokenizer, theirs))
    if ours_by_token != theirs_by_token:
        shared = len(ours_by_token.items() & theirs_by_token.items())
        ours = data.tokenizer or f"trained by data={data.source}"
        raise ConfigError(
            f"{key}={folder} has another tokenizer than the data ({ours}): of its {num_ids(theirs)} ids "
            f"{shared} stand for the same text; use data.tokenizer={path}, or to go on anyway "
            f"checkpoint.other_tokenizer=true"
        )
    if tokenizer_hash(tokenizer) != tokenizer_hash(theirs):
        log.warning("%s=%s has the data's token ids, but its tokenizer splits text differently", key, folder)


@functools.cache  # a start checks the tokenizer several times
def _warn_without_tokenizer(key: str, folder: Path) -> None:
    log.warning("%s=%s has no %s, so the data's tokenizer was not compared", key, folder, TOKENIZER_FILE)


def _start(checkpoint: CheckpointConfig) -> tuple[str, Path] | None:
    for key, folder in (("resume_from", checkpoint.resume_from), ("init_from", checkpoint.init_from)):
        if folder:
            return f"checkpoint.{key}", Path(folder)
    return None


def _tokenizer_in(folder: Path) -> Path:
    return run_of(folder.absolute()) / TOKENIZER_FILE


@contextmanager
def named_source(key: str, folder: str | None) -> Iterator[None]:
    """Context that prefixes errors with the key that named the folder, if any."""
    try:
        yield
    except (CheckpointError, ConfigError) as error:
        if not folder:
            raise
        raise type(error)(f"checkpoint.{key}={folder}: {error}") from error
