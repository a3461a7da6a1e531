"""Cache of traced graphs for jobs whose code depends on equal facts; a trace takes seconds."""

import dataclasses
import enum
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import psutil
import torch

from graphmoe.runtime.cache.blobs import write_whole
from graphmoe.runtime.cache.key import own_sources
from graphmoe.runtime.compile.graphs import UnitGraphs
from graphmoe.runtime.host.files import dispensable
from graphmoe.runtime.host.logs import FILE_ONLY
from graphmoe.runtime.torch_compat import graphs_from_bytes, graphs_to_bytes

log = logging.getLogger(__name__)

SOURCES = ("graphmoe", "torch", "builtins")
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


def kept_graphs(folder: Path | None, key: tuple[Any, ...], trace: Callable[[], UnitGraphs]) -> UnitGraphs:
    """Return the graphs stored under ``key``; if there are none, trace and store them."""
    if folder is None:
        return trace()
    # None for an object of this process (a nested function, a user's class), whose source is no fact
    text = lasting_text(key)
    file = folder / hashlib.sha256((text or "").encode()).hexdigest()[:24]
    if text is not None and file.exists():
        try:
            graphs: UnitGraphs = graphs_from_bytes(file.read_bytes())
            for module in graphs.modules():
                module.recompile()
        except Exception as error:  # any type: pickles of another environment
            log.warning("compile cache: %s cannot be read (%s); the unit is traced again", file, error)
        else:
            for report in graphs.reports:
                report.warn()
            return graphs
    graphs = trace()
    try:
        if text is None:
            raise ValueError("the unit's key has an object of this process only, such as a nested function")
        if _are_sources_edited():
            raise ValueError("a source was edited after this process had started")
        content = graphs_to_bytes(graphs)
    except Exception as error:  # any type: any object of a graph may refuse to be pickled
        line = "the graphs of %s are not saved, so the next run traces it again: %s"
        log.info(line, graphs.name, error, extra=FILE_ONLY)  # a pickling error helps no user
        return graphs
    with dispensable(file):
        write_whole(file, content)
    return graphs


def _are_sources_edited() -> bool:
    # the facts hash files on disk, and this process runs what it imported at its start
    started = psutil.Process().create_time()
    return any(source.stat().st_mtime > started for source in own_sources())


def lasting_text(value: Any) -> str | None:
    """Return a text that identifies ``value`` in all processes; None if impossible."""
    if isinstance(value, enum.Enum):
        return lasting_text((type(value), value.name))
    if type(value) in PLAIN:
        return repr(value)
    if isinstance(value, type | FunctionType):
        is_ours = value.__module__.partition(".")[0] in SOURCES
        holds_more = "<" in value.__qualname__ or getattr(value, "__closure__", None)
        return f"{value.__module__}.{value.__qualname__}" if is_ours and not holds_more else None
    if dataclasses.is_dataclass(value):
        value = (type(value), *vars(value).values())
    elif isinstance(value, frozenset):
        value = tuple(sorted(value))
    if not isinstance(value, tuple):
        return None
    parts = [text for part in value if (text := lasting_text(part)) is not None]
    return f"({','.join(parts)})" if len(parts) == len(value) else None
