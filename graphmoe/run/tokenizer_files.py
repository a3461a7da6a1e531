"""Tokenizer files of exported folders: those of the folder that a run started from, or the run's own."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from graphmoe.config.choices import SOURCES, SourceFacts
from graphmoe.config.untrusted import read_bytes, read_json
from graphmoe.data.tokenizer import TEMPLATE_FILE, TOKEN_IDS, find_tokenizer, tokenizer_file
from graphmoe.run.stored import (
    META_FILE,
    FolderKind,
    StoredRun,
    WeightsMeta,
    kind_if_any,
    read_stored_run,
    run_tokenizer,
)

log = logging.getLogger(__name__)

TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG = (
    f"{name}.json" for name in ("tokenizer", "tokenizer_config", "generation_config")
)
FILES = (
    *(TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG, "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "tiktoken.model"),
    *(TEMPLATE_FILE, "chat_template.json"),
)
"""Names of files that are copied; none of them holds code."""


class TokenizerSource(NamedTuple):
    path: Path  # tokenizer.json, possibly missing; its other files are beside it
    token_ids: dict[str, Any]
    end_token: str | None = None  # token that ends a run's documents, if no file may say it
    template: Path | None = None  # a run's copy of data.chat_template, for the file beside the tokenizer


def tokenizer_of_run(run: Path) -> TokenizerSource:
    """Return the tokenizer of a run, given its folder or a checkpoint. *Raises* ConfigError.

    If the run kept the tokenizer of a Hugging Face folder that it started from, that folder's files are taken
    as they are.
    """
    config, stored = read_stored_run(run)
    template = config.with_name(TEMPLATE_FILE) if stored.data.chat_template else None
    if (start := _kept_start(stored)) is not None:
        return TokenizerSource(start / TOKENIZER, token_ids_of(start), template=template)
    path, end, token = run_tokenizer(run)
    ids = start_token_ids(run) | ({} if end is None else {"eos_token_id": end})
    return TokenizerSource(path, ids, token, template)


def _kept_start(run: StoredRun) -> Path | None:
    start, data = run.checkpoint, run.data
    if not start.init_from or start.other_tokenizer or data.eod_token is not None:
        return None
    folder = Path(start.init_from)
    if kind_if_any(folder) is not FolderKind.hf:
        return None
    if data.tokenizer is None:
        facts = SOURCES.get(data.source or "", SourceFacts())
        return folder if facts.ignores("tokenizer") else None
    return folder if tokenizer_file(data.tokenizer).parent.resolve() == folder.resolve() else None


def start_token_ids(run: Path) -> dict[str, Any]:
    """Return begin and padding token ids of the weights that a run, or one before it, started from."""
    places, seen = [run], set[Path]()
    while places:
        if (folder := places.pop(0).absolute()) in seen:
            continue
        seen.add(folder)
        if (kind := kind_if_any(folder)) is FolderKind.graphmoe:
            ids: Mapping[str, Any] = read_json(folder / META_FILE, WeightsMeta).token_ids or {}
        elif kind is FolderKind.hf:
            ids = token_ids_of(folder)
        else:
            if kind is FolderKind.run:
                stored = read_stored_run(folder)[1]
                start, tokenizer = stored.checkpoint, stored.data.tokenizer
                # the tokenizer's path is absolute, that of a start may not be
                places += [find_tokenizer(tokenizer, fetch=False).parent] if tokenizer else []
                named = None if start.other_tokenizer else start.init_from or start.resume_from
                places += [Path(named)] if named else []
            continue
        return {key: ids[key] for key in ("bos_token_id", "pad_token_id") if ids.get(key) is not None}
    return {}


def token_ids_of(folder: Path) -> dict[str, Any]:
    """Return the token ids in a Hugging Face folder's config.json."""
    raw = read_json(folder / "config.json", dict[str, Any])
    of_text = raw.get("text_config")  # of a model of text and images
    raw = {**raw, **of_text} if isinstance(of_text, dict) else raw
    return {key: raw.get(key) for key in TOKEN_IDS}


def write_tokenizer(source: TokenizerSource, to: Path, context_length: int) -> list[Path]:
    """Write a folder's tokenizer files, copied if they exist; return their paths."""
    places = {name: source.path.with_name(name) for name in FILES} | {TOKENIZER: source.path}
    found = {name: path for name, path in places.items() if path.is_file() and _is_of_its_folder(path)}
    if source.template is not None:
        found.pop(TEMPLATE_FILE, None)
        if source.template.is_file() and _is_of_its_folder(source.template):
            found[TEMPLATE_FILE] = source.template
    made: dict[str, dict[str, Any]] = {}
    if source.end_token is not None:
        found.pop(GENERATION_CONFIG, None)  # it would describe the model that the tokenizer is from
        made[GENERATION_CONFIG] = source.token_ids
        if TOKENIZER_CONFIG not in found:
            made[TOKENIZER_CONFIG] = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": source.end_token,
                "model_max_length": context_length,
                "clean_up_tokenization_spaces": False,
            }
    for name, path in found.items():
        (to / name).write_bytes(read_bytes(path))
    for name, document in made.items():
        (to / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return [to / name for name in (*found, *made)]


def _is_of_its_folder(path: Path) -> bool:
    folder, real = path.parent.resolve(), path.resolve()
    if folder.parent.name == "snapshots":  # of the hub's cache, whose links lead to blobs of the repository
        folder = folder.parent.parent
    if not real.is_relative_to(folder):  # it might be any file of this machine
        log.warning("%s is a link to a file outside its folder, and is not copied", path)
        return False
    return True
