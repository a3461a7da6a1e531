"""Compile units: maximal runs of neighbouring segments, their fingerprint, and their traced graphs.

The forward is traced first, so that passes need not match a pattern's backward.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from graphmoe.config.schema import ConfigError
from graphmoe.runtime.torch_compat import (
    FakeTensorMode,
    custom_function_of,
    fake_mode,
    make_fx,
    set_grad_enabled,
    tree_map_only,
)
from graphmoe.segments import Segment


class UntraceableSegment(RuntimeError):
    """A segment that cannot become a graph."""


@dataclass(frozen=True)
class Unit:
    """Neighbouring segments that are compiled as one graph."""

    segments: tuple[Segment, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]  # tensors that are read after it
    captured: bool = False
    dynamic: bool = False  # True if sizes differ from call to call: it runs uncompiled

    @property
    def name(self) -> str:
        first, last = self.segments[0].name, self.segments[-1].name
        return first if first == last else f"{first}..{last}"  # such as attn..moe_combine


def units_of(
    segments: Sequence[Segment],
    keep: Sequence[str],
    captured: Set[str] = frozenset(),
    apart: Set[str] = frozenset(),
) -> list[Unit]:
    """Group segments into compile units; cut if stream, captured or dynamic changes, and around ``apart``."""

    def kind(segment: Segment) -> tuple[str, bool, bool, str]:
        own = segment.name if segment.name in apart else ""
        return segment.stream, segment.name in captured, segment.dynamic, own

    units = joined([[*group] for _, group in itertools.groupby(segments, key=kind)], keep)
    for i, unit in enumerate(units):
        _, is_captured, is_dynamic, _ = kind(unit.segments[0])
        assert not (is_captured and is_dynamic), f"{unit.name} waits for the host, and no graph can hold it"
        units[i] = dataclasses.replace(unit, captured=is_captured, dynamic=is_dynamic)
    return units


def joined(groups: Sequence[Sequence[Segment]], keep: Sequence[str]) -> list[Unit]:
    """Make each group of neighbouring segments a unit; ``keep``: tensors needed at the end."""
    units: list[Unit] = []
    wanted = set(keep)
    for group in reversed(groups):
        written = {name for segment in group for name in segment.writes}
        reads = _reads(group)
        units.append(Unit(tuple(group), reads, tuple(sorted(written & wanted))))
        wanted = (wanted - written) | set(reads)
    return units[::-1]


def _reads(group: Sequence[Segment]) -> tuple[str, ...]:
    reads, written = dict[str, None](), set[str]()
    for segment in group:
        reads.update((name, None) for name in segment.reads if name not in written)
        written.update(segment.writes)
    return tuple(reads)


@dataclass(frozen=True)
class BoundUnit:
    unit: Unit
    owners: tuple[nn.Module | None, ...]
    names: tuple[tuple[int, str, int], ...]
    """(segment, name, position among ``tensors``) of each parameter and buffer."""
    tensors: tuple[Tensor, ...]  # parameters, then buffers; shared ones once
    num_parameters: int

    @classmethod
    def of(cls, unit: Unit) -> BoundUnit:
        owners = tuple(owner_of(segment.run) for segment in unit.segments)
        for owner, segment in zip(owners, unit.segments, strict=True):
            known = owner is not None or getattr(segment.run, "__self__", None) is None
            assert known, f"{segment.run} has state that no fingerprint would tell"
        held = [(i, owner) for i, owner in enumerate(owners) if owner is not None]
        parameters = [(i, n, p) for i, o in held for n, p in o.named_parameters(remove_duplicate=False)]
        buffers = [(i, n, b) for i, o in held for n, b in o.named_buffers(remove_duplicate=False)]
        unique = {id(tensor): tensor for _, _, tensor in (*parameters, *buffers)}
        position = {key: index for index, key in enumerate(unique)}
        names = tuple((i, name, position[id(t)]) for i, name, t in (*parameters, *buffers))
        return cls(unit, owners, names, tuple(unique.values()), len({id(p) for _, _, p in parameters}))

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run as a pure function of (parameters, buffers, inputs). Raises UntraceableSegment."""
        held, read = tensors[: len(self.tensors)], tensors[len(self.tensors) :]
        values = dict(zip(self.unit.reads, read, strict=True))
        for i, (segment, owner) in enumerate(zip(self.unit.segments, self.owners, strict=True)):
            own = {name: held[position] for j, name, position in self.names if j == i}
            given = [*own.items(), *((name, values[name]) for name in segment.reads)]
            versions = [tensor._version for _, tensor in given]
            try:
                with fx.traceback.annotate({"segment": segment.name}):
                    results = _call(segment.run, owner, own, [values[name] for name in segment.reads])
                    if isinstance(results, Tensor):
                        results = (results,)
                    refuse_custom_gradients(results)
                    for (name, tensor), version in zip(given, versions, strict=True):
                        if tensor._version != version:
                            raise TypeError(f"the segment changes {name} in place")
            except ConfigError:
                raise
            except Exception as error:
                raise UntraceableSegment(
                    f"segment {segment.name} of {self.unit.name} cannot be compiled: {error}; a compiled "
                    f"segment is a function of tensors that neither reads their values on the host nor "
                    f"changes them; compile.enabled=false runs it as it is"
                ) from error
            values.update(zip(segment.writes, results, strict=True))
        return tuple(values[name] for name in self.unit.writes)

    def fingerprint(self) -> tuple[Any, ...]:
        """Return a value that is equal for units that compute the same function."""
        segments = tuple((s.name, s.reads, s.writes, _function_of(s.run)) for s in self.unit.segments)
        return segments, self.unit.reads, self.unit.writes, tuple(map(_description, self.owners)), self.names


def owner_of(run: Callable[..., Any]) -> nn.Module | None:
    """Return the module of a segment, if it has one."""
    owner = getattr(run, "__self__", run)
    return owner if isinstance(owner, nn.Module) else None


def _function_of(run: Callable[..., Any]) -> Callable[..., Any] | None:
    return None if isinstance(run, nn.Module) else getattr(run, "__func__", run)


class _Method(nn.Module):
    """Lets ``functional_call`` call a method other than ``forward``."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        self.owner, self.name = owner, name

    def forward(self, *arguments: Tensor) -> Any:
        return getattr(self.owner, self.name)(*arguments)


def _call(
    run: Callable[..., Any], owner: nn.Module | None, held: dict[str, Tensor], arguments: list[Tensor]
) -> Any:
    if owner is None:
        return run(*arguments)
    if run is owner:
        return torch.func.functional_call(owner, held, tuple(arguments))
    method = _Method(owner, run.__name__)
    named = {f"owner.{name}": tensor for name, tensor in held.items()}
    return torch.func.functional_call(method, named, tuple(arguments))


class Unique(int):
    """Stands for a module that has an attribute without a comparable value; equals only itself."""


def _description(module: nn.Module | None) -> tuple[Any, ...]:
    if module is None:
        return ()
    skipped = set(nn.Module().__dict__) - {"training"}  # tensors, submodules and hooks
    attributes = tuple(
        (name, _plain(value, module))
        for name, value in sorted(module.__dict__.items())
        if name not in skipped
    )
    children = tuple((name, _description(child)) for name, child in module.named_children())
    return type(module), attributes, children


def _plain(value: Any, module: nn.Module) -> Any:
    if value is None or isinstance(value, bool | int | float | str | enum.Enum | torch.dtype):
        return type(value), value  # 1, 1.0 and True are equal
    if isinstance(value, tuple | list):
        return tuple(_plain(item, module) for item in value)
    if isinstance(value, dict):
        return tuple((_plain(key, module), _plain(item, module)) for key, item in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), *(_plain(getattr(value, f.name), module) for f in dataclasses.fields(value))
    return Unique(id(module))


def fakes_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    mode = fake_mode()
    with mode:
        return [
            torch.empty_strided(
                t.shape, t.stride(), dtype=t.dtype, device=t.device, requires_grad=t.requires_grad
            )
            for t in tensors
        ]


def trace_in_place(run: Callable[..., Sequence[Tensor]], fakes: Sequence[Tensor]) -> fx.GraphModule:
    """Trace ``run(*tensors)`` without gradients; mutations become copies at the end of the graph."""
    mode: FakeTensorMode = fakes[0].fake_mode  # type: ignore[attr-defined]
    with mode, torch.no_grad():
        return make_fx(torch.func.functionalize(run, remove="mutations"))(*fakes)


def trace_forward(run: Callable[..., tuple[Tensor, ...]], fakes: Sequence[Tensor]) -> fx.GraphModule:
    """Trace ``run(*tensors)`` into a functional ATen graph with one output tuple.

    Composite operations are decomposed, except ours and attention kernels; a custom autograd function is
    traced as its forward. ``node.meta`` has the fake value as "val", the annotation as "custom".
    """
    mode: FakeTensorMode = fakes[0].fake_mode  # type: ignore[attr-defined]

    def detaching(*tensors: Tensor) -> tuple[Tensor, ...]:
        with _DetachWithoutGradients():
            return run(*tensors)

    with mode, torch.enable_grad(), fx.traceback.preserve_node_meta():
        traced = make_fx(detaching)(*fakes)  # grad mode: attention saves what its backward reads

    def again(*tensors: Tensor) -> tuple[Tensor, ...]:
        return fx.Interpreter(traced).run(*tensors)

    with mode, torch.no_grad(), fx.traceback.preserve_node_meta():
        functional = make_fx(torch.func.functionalize(again, remove="mutations"))(*fakes)
    functional.graph.eliminate_dead_code()
    functional.recompile()
    return functional


class _DetachWithoutGradients(TorchFunctionMode):
    """Detaches results under ``torch.no_grad()``: a graph has no gradient mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        before = [a._version if isinstance(a, Tensor) and a.requires_grad else None for a in args]
        result = func(*args, **(kwargs or {}))
        if func is set_grad_enabled:
            self.stopped = not args[0]
        elif self.stopped or torch.is_inference_mode_enabled():
            if any(v is not None and a._version != v for a, v in zip(args, before, strict=True)):
                raise TypeError("a tensor with a gradient is changed in place under torch.no_grad()")
            result = tree_map_only(Tensor, torch.detach, result)
        return result


def refuse_custom_gradients(outputs: Sequence[Tensor]) -> None:
    """Raise TypeError for a custom autograd function without ``gradient_of_forward = True``."""
    # a trace differentiates its forward instead
    todo, seen = [output.grad_fn for output in outputs], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [earlier for earlier, _ in node.next_functions]
        function = custom_function_of(node)
        if function is not None and not getattr(function, "gradient_of_forward", False):
            name = function.__name__
            raise TypeError(
                f"the backward of the torch.autograd.Function {name} cannot be compiled; make it a "
                f"torch.library operation with register_autograd, or set {name}.gradient_of_forward = True "
                f"if it is just the gradient of the forward"
            )
