"""The cases of a suite one after the other: each row is told and kept as soon as it is there."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from graphmoe.bench.cases import as_plain
from graphmoe.config.schema import ConfigError

log = logging.getLogger(__name__)


class Named(Protocol):
    @property
    def name(self) -> str: ...


AnyCase = TypeVar("AnyCase", bound=Named)
AnyRow = TypeVar("AnyRow")


def one_by_one(
    cases: Sequence[AnyCase],
    run: Callable[[AnyCase], list[AnyRow]],
    told: Callable[[list[AnyRow]], str],
    out: Path | None,
) -> list[AnyRow]:
    """The rows of all cases, each logged and kept as soon as it is there."""
    rows: list[AnyRow] = []
    for number, case in enumerate(cases, start=1):
        started = time.monotonic()
        found = run(case)
        seconds = time.monotonic() - started
        log.info("[%d/%d] %s: %s (%.1f s)", number, len(cases), case.name, told(found), seconds)
        keep(out, found)
        rows += found
    return rows


def keep(out: Path | None, rows: Sequence[object]) -> None:
    """Add rows to a file beside the one that the document will be, for a suite that ends before."""
    if out is None or not is_first():
        return
    lines = "".join(json.dumps(row) + "\n" for row in as_plain(rows))
    try:
        with rows_file(out).open("a", encoding="utf-8") as file:
            file.write(lines)
    except OSError as error:
        log.warning("rows are not kept meanwhile: %s", error)


def rows_file(out: Path) -> Path:
    """Where rows stand until the document is written."""
    return out.with_suffix(".rows.jsonl")


def chosen(cases: list[AnyCase], prefixes: Sequence[str]) -> list[AnyCase]:
    """Cases whose name starts with one of the prefixes. *Raises* ConfigError for a prefix of none."""
    unknown = [prefix for prefix in prefixes if not any(case.name.startswith(prefix) for case in cases)]
    if unknown:
        names = ", ".join(case.name for case in cases)
        raise ConfigError(f"only={','.join(unknown)}: no case starts with that; cases are {names}")
    return [case for case in cases if not prefixes or case.name.startswith(tuple(prefixes))]


def is_first() -> bool:
    """Whether this process says what was measured."""
    return int(os.environ.get("RANK", "0")) == 0
