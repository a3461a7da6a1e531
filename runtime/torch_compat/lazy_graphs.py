"""Traces whose Python code is made when it is needed; it stands on torch/fx/_lazy_graph_module.py."""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import cast

from torch.fx._lazy_graph_module import _use_lazy_graph_module


def lazy_graph_modules() -> ContextDecorator:
    """Graphs that are traced inside get their Python code when they are run, if ever.

    Most graphs on the way to a unit's code are only read and cut, and their code took a sixth of
    a run that traces and compiles nothing.
    Inductor does the same with its own.
    """
    return cast(ContextDecorator, _use_lazy_graph_module(True))
