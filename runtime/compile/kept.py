"""Graphs of units, which jobs of the same facts keep in the compile cache: a trace takes seconds."""

import dataclasses
import enum
import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import psutil
import torch
from torch import fx

from graphmoe.runtime.cache.blobs import write_whole
from graphmoe.runtime.cache.key import own_sources
from graphmoe.runtime.compile.graphs import UnitGraphs
from graphmoe.runtime.host.files import dispensable
from graphmoe.runtime.host.logs import FILE_ONLY
from graphmoe.runtime.torch_compat import graphs_from_bytes, graphs_to_bytes

log = logging.getLogger(__name__)

SOURCES = ("graphmoe", "torch", "builtins")
"""Packages whose versions or sources are facts of the cache."""
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


def kept_graphs(folder: Path | None, key: tuple[Any, ...], trace: Callable[[], UnitGraphs]) -> UnitGraphs:
    """Return the graphs that lie in ``folder`` under ``key``; where none do, trace them and leave them there.

    ``key`` decides the graphs together with the facts of the job. Graphs are not kept where it holds
    something that is this process's own, such as a function within a function or a user's class, whose source
    is no fact.
    """
    if folder is None:
        return trace()
    text = lasting_text(key)
    file = folder / hashlib.sha256((text or "").encode()).hexdigest()[:24]
    if text is not None and file.exists():
        try:
            graphs = _loaded(file)
        except Exception as error:  # of any type: another environment stored it, with pickles of its own
            log.warning("compile cache: %s cannot be read (%s); its unit is traced", file, error)
        else:
            for report in graphs.reports:
                report.warn()
            return graphs
    graphs = trace()
    try:
        if text is None:
            raise ValueError("a part of it is in this process alone")
        if _are_sources_edited():
            raise ValueError("a source was edited after this process had started")
        content = graphs_to_bytes(graphs)
    except Exception as error:  # of any type: whatever a graph calls may refuse to be stored
        line = "the graphs of %s are not kept, so the next run traces it again: %s"
        log.info(line, graphs.name, error, extra=FILE_ONLY)  # the reason is a pickler's, which helps no user
        return graphs
    with dispensable(file):
        write_whole(file, content)
    return graphs


def _loaded(file: Path) -> UnitGraphs:
    graphs: UnitGraphs = graphs_from_bytes(file.read_bytes())
    for module in _modules(graphs):
        module.recompile()
    return graphs


def _are_sources_edited() -> bool:
    """Return whether a source changed since this process started: the facts may have another than it runs."""
    started = psutil.Process().create_time()
    return any(source.stat().st_mtime > started for source in own_sources())


def _modules(graphs: UnitGraphs) -> Iterator[fx.GraphModule]:
    yield graphs.forward
    if graphs.views:
        yield graphs.views.graph
    if graphs.backward:
        yield from (graphs.backward.inputs, graphs.backward.weights)


def lasting_text(value: Any) -> str | None:
    """Return a text that stands for ``value`` in all processes; None where there is none."""
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
