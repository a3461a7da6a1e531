"""Eager recomputation of `graphmoe.plan.recompute.Recompute`; compiled units do it in `cut`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from graphmoe.config.schema import ConfigError
from graphmoe.plan.recompute import Recompute
from graphmoe.runtime.compile.units import Unit, joined
from graphmoe.runtime.torch_compat import draws_random_numbers
from graphmoe.segments import Executor, Segment, run_segments


class RecomputedSegments:
    """Called like ``run_segments``; saves only inputs of recomputed segments. Bitwise equal, capturable."""

    def __init__(self, recompute: Recompute) -> None:
        assert not recompute.parts, "parts are chosen in graphs"
        self._recompute = recompute
        # layer and name of units known to draw no random numbers
        self._checked: set[tuple[int | None, str]] = set()

    def __call__(
        self, segments: Sequence[Segment], tensors: dict[str, Tensor], keep: tuple[str, ...]
    ) -> tuple[Tensor, ...]:
        """Raises ConfigError at the first call of a segment that draws random numbers."""
        if not torch.is_grad_enabled():
            return run_segments(segments, tensors, keep)
        values = dict(tensors)
        runs = self._recompute.runs(segments)
        for (covered, _), unit in zip(runs, joined([run for _, run in runs], keep), strict=True):
            run = self._run_again if covered else _run
            results = run(unit, *(values[name] for name in unit.reads))
            values.update(zip(unit.writes, results, strict=True))
        return tuple(values[name] for name in keep)

    def _run_again(self, unit: Unit, *read: Tensor) -> tuple[Tensor, ...]:
        key = (unit.segments[0].layer, unit.name)
        if key in self._checked:
            return _checkpointed(unit, *read)
        with _WithoutRandomNumbers(unit.name):
            results = _checkpointed(unit, *read)
        self._checked.add(key)
        return results


def executor_outside_graphs(recompute: Recompute) -> Executor:
    """Return the executor of uncompiled segments."""
    whole = replace(recompute, parts=frozenset())
    if recompute.parts and not recompute.segments:
        return run_segments  # then layers select parts, not whole layers
    return RecomputedSegments(whole) if whole else run_segments


def refuse_random_numbers(where: str, target: Any, arguments: Sequence[Any], named: dict[str, Any]) -> None:
    """Raise ConfigError for an operation whose results would differ when recomputed."""
    if draws_random_numbers(target, arguments, named):
        raise ConfigError(
            f"recompute covers {where}, which draws random numbers ({target}) and would draw others when it "
            f"is computed again; leave it out of recompute.segments, or use recompute=none"
        )


def _run(unit: Unit, *read: Tensor) -> tuple[Tensor, ...]:
    return run_segments(unit.segments, dict(zip(unit.reads, read, strict=True)), unit.writes)


def _checkpointed(unit: Unit, *read: Tensor) -> tuple[Tensor, ...]:
    # Saving the generator's state would sync with the device, and nothing here draws from it.
    return checkpoint(_run, unit, *read, use_reentrant=False, preserve_rng_state=False)


class _WithoutRandomNumbers(TorchDispatchMode):
    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        refuse_random_numbers(self._where, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
