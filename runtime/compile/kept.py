"""Graphs of units, which jobs of the same facts keep in the compile cache: a trace takes seconds."""

import dataclasses
import enum
import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import fx

from graphmoe.runtime.cache.blobs import write_whole
from graphmoe.runtime.compile.graphs import UnitGraphs
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
    text = lasting_text(key) if folder is not None else None
    if folder is None or text is None:
        return trace()
    file = folder / hashlib.sha256(text.encode()).hexdigest()[:24]
    if file.exists():
        graphs: UnitGraphs = graphs_from_bytes(file.read_bytes())
        for module in _modules(graphs):
            module.recompile()
        return graphs
    graphs = trace()
    try:
        content = graphs_to_bytes(graphs)
    except Exception as error:  # of any type: whatever a graph calls may refuse to be stored
        log.info("%s is traced by each run, as its graphs cannot be stored: %s", graphs.name, error)
    else:
        write_whole(file, content)
    return graphs


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
