"""Logs of a dry run's step: collectives and bytes of each operation.

Bytes are of tensors and of graphmoe operations' workspaces, without allocator rounding and gaps and without
libraries' memory.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphmoe.config.formats import FORMATS
from graphmoe.ops.grouped_mlp.tuning import BLOCK_R
from graphmoe.ops.linear_cross_entropy import rows_per_chunk
from graphmoe.plan.pipeline import Kind, Step, parts
from graphmoe.plan.pipeline.simulate import Track
from graphmoe.plan.pipeline.transfers import Channel, Message
from graphmoe.runtime.pipeline.channels import Arrival, Channels, Specs
from graphmoe.runtime.torch_compat import in_backward, storage_of
from graphmoe.training.dry_run.collectives import CollectiveLog

HOST = "host"  # kind of memory that is not the device's
_PHASES: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}


class MemoryLog:
    """Record of live storage bytes by kind, from a tensor's first use to its storage's end."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}  # live bytes by kind
        self.held: dict[str, int] = {}  # bytes counted by ``hold``
        self.peak: dict[str, int] = {}  # live bytes by kind at their largest sum
        self.by_segment: dict[str, int] = {}  # live bytes allocated in the forward, by segment
        self.peak_by_segment: dict[str, int] = {}
        self.peak_phase = ""
        self.peaks: dict[str, int] = {}  # largest sum per phase
        self.host_bytes = self._on_host = 0  # the most and the live bytes in host memory
        self._live: set[int] = set()

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    def hold(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count tensors that stay allocated for the whole step; call before ``saw``."""
        for tensor in tensors:
            self._add(tensor, kind)
        self.held = dict(self.now)

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors in host memory apart, unless they are counted on the device."""
        for tensor in tensors:
            self._add(tensor, HOST)

    def saw(self, result: Any, phase: str, segment: str = "") -> None:
        """Count an operation's result; a storage not seen before counts as kind ``phase``."""
        if isinstance(result, list | tuple):
            for item in result:
                self.saw(item, phase, segment)
        elif isinstance(result, Tensor):
            self._add(result, phase, segment)
        self._note(phase)

    def borrowed(self, size: int, phase: str) -> None:
        """Count an operation's temporary workspace."""
        self._change("inside", size)
        self._note(phase)
        self._change("inside", -size)

    def _note(self, phase: str) -> None:
        total = sum(self.now.values())
        self.peaks[phase] = max(self.peaks.get(phase, 0), total)
        if total > self.peak_bytes:
            self.peak, self.peak_phase = dict(self.now), phase
            self.peak_by_segment = dict(self.by_segment)

    def _add(self, tensor: Tensor, kind: str, segment: str = "") -> None:
        key, storage = storage_of(tensor)
        if key in self._live:
            return
        size = storage.nbytes()
        self._live.add(key)
        self._change(kind, size, segment)

        def end() -> None:
            self._live.remove(key)
            self._change(kind, -size, segment)

        weakref.finalize(storage, end).atexit = False

    def _change(self, kind: str, size: int, segment: str = "") -> None:
        if kind == HOST:
            self._on_host += size
            self.host_bytes = max(self.host_bytes, self._on_host)
            return
        self.now[kind] = self.now.get(kind, 0) + size
        if kind == "forward":
            self.by_segment[segment] = self.by_segment.get(segment, 0) + size


class StepWatch(TorchDispatchMode):
    """Dispatch mode that logs each operation's collectives and memory by phase and segment."""

    def __init__(self, collectives: CollectiveLog, memory: MemoryLog, *, has_data: bool = False) -> None:
        """``has_data``: the tensors are real."""
        super().__init__()
        self.phase = "update"  # phase of the next operations, until autograd starts a backward
        self.segment = ""  # segment whose operations run
        self.on_host = False  # operations make tensors in host memory
        self._collectives, self._memory, self._has_data = collectives, memory, has_data

    @contextmanager
    def message(self, message: Message) -> Iterator[None]:
        """Context whose operations count for the phase of the message: forward or backward."""
        before = self.phase, self.segment
        self.phase, self.segment = _PHASES[message.content.kind], "messages"
        yield
        self.phase, self.segment = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not (self._has_data or func._schema.returns) and func.namespace == "aten":
            return None  # changes its arguments, which have no data: torch's fused AdamW has no fake
        result = func(*args, **(kwargs or {}))
        if in_backward():
            self.phase = "backward"
        self._collectives.saw(func, args, result, self.phase)
        if self.on_host:
            self._memory.leave([result] if isinstance(result, Tensor) else [])
            return result
        self._memory.saw(result, self.phase, self.segment)
        if inside := bytes_inside(func, args):
            self._memory.borrowed(inside, self.phase)
        return result


class WatchedSteps:
    """Step recorder of a pipeline that records nothing and sets the watch's phase.

    The second action of a pair gets its phase from `StepWatch`. ``say`` receives progress text.
    """

    def __init__(self, watch: StepWatch, num_moves: int, say: Callable[[str], None]) -> None:
        self._watch, self._num_moves, self._say = watch, num_moves, say
        self._begun = 0

    def start(self) -> None:
        self._begun = 0

    @contextmanager
    def span(self, track: Track, step: Step) -> Iterator[None]:
        self._watch.phase = _PHASES[parts(step)[0].kind]
        if track == "compute":
            self._begun += 1
            self._say(f"move {self._begun} of {self._num_moves} of the schedule")
        yield


class WatchedChannels(Channels):
    """Channels whose messages count as forward or backward by their content."""

    def __init__(
        self,
        watch: StepWatch,
        channels: Iterable[Channel],
        pipelines: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        super().__init__(channels, pipelines, device)
        self._watch = watch

    def send(self, message: Message, tensors: Iterable[Tensor]) -> None:
        with self._watch.message(message):
            super().send(message, tensors)

    def receive(self, message: Message, specs: Specs) -> Arrival:
        with self._watch.message(message):
            return super().receive(message, specs)


def bytes_inside(func: Any, args: tuple[Any, ...]) -> int:
    """Return a graphmoe operation's GPU workspace in bytes."""
    namespace, _, name = func.name().partition("::")
    return _OF_OURS[name](*args) if namespace == "graphmoe" and name in _OF_OURS else 0


def _logits(h_TD: Tensor, w_VD: Tensor, *_: Any) -> int:
    tokens, vocabulary, size = h_TD.shape[0], w_VD.shape[0], h_TD.element_size()
    return min(rows_per_chunk(tokens, vocabulary, size), tokens) * vocabulary * size


def _expert_rows(
    x_TD: Tensor, w_gate_up: Tensor, w_down: Tensor, _: Tensor, slot_R: Tensor, *rest: Any
) -> int:
    of_rows = slot_R.shape[0] * (w_down.shape[1] + w_down.shape[2]) * x_TD.element_size()
    return of_rows + _of_replicas(rest[3:], w_gate_up, w_down)


def _expert_row_gradients(dy_TD: Tensor, h_RH: Tensor, w_gate_up: Tensor, w_down: Tensor, *rest: Any) -> int:
    of_rows = h_RH.shape[0] * dy_TD.shape[1] * dy_TD.element_size()
    return of_rows + _of_replicas(rest[5:], w_gate_up, w_down)


def _of_replicas(replicas: Sequence[Tensor | None], *weights: Tensor) -> int:
    expert_RS, given = (*replicas, None, None)[:2]
    slots = expert_RS.shape[1] if expert_RS is not None and given is None else 0
    return sum(slots * w[0].nbytes for w in weights)


def _fp8_rows(xq_TD: Tensor, _: Tensor, gate_up_q: Tensor, *rest: Any) -> int:
    (H, D), R, size = gate_up_q.shape[1:], rest[4].shape[0], rest[7].itemsize
    return int(R * (size * (H + D) + H // 2)) + _of_replicas(rest[11:], gate_up_q, *rest[:3])


def _fp8_hidden(
    xq_TD: Tensor, _: Tensor, gate_up_q: Tensor, gate_up_s: Tensor, slot_R: Tensor, *rest: Any
) -> int:
    of_rows = int(slot_R.shape[0] * gate_up_q.shape[1] * rest[2].itemsize)
    return of_rows + _of_replicas(rest[4:], gate_up_q, gate_up_s)


def _fp8_row_gradients(dyq_TD: Tensor, _: Tensor, hq_RH: Tensor, *rest: Any) -> int:
    (R, H), D = hq_RH.shape, dyq_TD.shape[1]
    return int(R * (H // 2 + D) * rest[9].itemsize) + _of_replicas(rest[14:], *rest[1:5])


def _fp8_sides(dyq_TD: Tensor, dys_T1: Tensor, xq_TD: Tensor, __: Tensor, dhq_RH: Tensor, *rest: Any) -> int:
    # Transposed copies of both operands of both GEMMs; rows of each expert fill whole tiles. GEMMs with block
    # scales run one after the other.
    (R, H), D, E = dhq_RH.shape, xq_TD.shape[1], rest[5].shape[0]
    by = FORMATS[next(each for each in rest if isinstance(each, str))]
    columns = (H + D) * (by.block + by.scale_bytes) // by.block if by.block else H + H // 2 + 2 * D
    return int((R + E * (BLOCK_R - 1)) * columns)


def _scattered(x: Tensor, axis: str, size: int, dim: int) -> int:
    # a contiguous copy of the parts, unless the tensor has them so
    return x.nbytes if math.prod(x.shape[:dim]) > 1 else 0


_OF_OURS: dict[str, Callable[..., int]] = {
    "linear_cross_entropy": _logits,
    "grouped_mlp": _expert_rows,
    # weights of replicas; its result is seen
    "grouped_mlp_hidden": lambda _, w_gate_up, *rest: _of_replicas(rest[4:], w_gate_up),
    "grouped_mlp_dgrad": _expert_row_gradients,
    "fp8_mlp_forward": _fp8_rows,
    "fp8_mlp_hidden": _fp8_hidden,
    "fp8_mlp_dgrad": _fp8_row_gradients,
    "fp8_mlp_wgrad": _fp8_sides,
    "fp8_mlp_wgrad_into": _fp8_sides,
    "all_gather": lambda x, axis, size, dim: size * _scattered(x, axis, size, dim),
    "reduce_scatter": _scattered,
}
