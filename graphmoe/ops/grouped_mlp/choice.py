"""Choice of the backends of forward, dgrad and wgrad of the grouped MLP, each by itself.

``moe.experts=auto`` times the capable backends once per shape and device, and stores the choice, as
another would change sums and a resumed run must be bitwise equal. Several ranks must use one rank's choice.
"""

import functools
import hashlib
import json
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from graphmoe.config import packages
from graphmoe.config.packages import VENDORS, require_package
from graphmoe.config.ranges import OWN_CODE
from graphmoe.config.schema import ConfigError
from graphmoe.ops import triton_version
from graphmoe.ops.grouped_mlp import BACKENDS, DIRECTIONS, row_of
from graphmoe.ops.grouped_mlp.reference import KEY
from graphmoe.ops.timing import WARM_UP_CALLS, time_in_turns

log = logging.getLogger(__name__)
NAME = "grouped_mlp"  # of stored answers
REPEATS = 20


@dataclass(frozen=True)
class MlpShape:
    """Sizes that determine the speed of the grouped MLP."""

    T: int  # tokens
    D: int  # hidden width
    F: int  # width of one expert
    E: int  # experts on this rank
    K: int  # experts of a token
    dtype: torch.dtype = torch.bfloat16


class Memory(Protocol):
    """Persistent storage of small values, such as measured choices."""

    def recall(self, name: str, facts: Mapping[str, Any]) -> Any | None:
        """Return the value stored for these facts, or None."""

    def remember(self, name: str, facts: Mapping[str, Any], answer: Any) -> Any:
        """Store a value; return the valid one, which may be another process's."""


def choose_backends(
    requested: str, shape: MlpShape, device: torch.device, memory: Memory | None, *, sync_free: bool = True
) -> str:
    """Return the backends as "forward,dgrad,wgrad": ``auto`` resolved, any other checked.

    ``requested``: auto, one or three of `BACKENDS`, or an import path (never one from a checkpoint). Without
    ``memory`` nothing is stored. ``sync_free`` excludes backends that wait for the host. Measuring waits for
    the device, so it cannot run in a capture. Raises ConfigError.
    """
    rows = BACKENDS | ({requested: row_of(requested)} if OWN_CODE.fullmatch(requested) else {})
    reasons = {n: row.reason_against(shape.dtype, device, sync_free) for n, row in rows.items()}
    if requested != "auto":
        return _checked(requested, reasons)
    able = [name for name, reason in reasons.items() if reason is None]
    names = [n for n in able if n not in VENDORS or not packages.reason_against(VENDORS[n], KEY)]
    if not names:
        raise ConfigError(
            f"{KEY}=auto finds no backend: "
            + "; ".join(f"{n} {r}" for n, r in reasons.items())
            + f"; use {KEY}=torch, which may wait for the host, or install triton"
        )
    if len(names) == 1:
        return ",".join(names * len(DIRECTIONS))
    facts = _facts(shape, device, names)

    def measure() -> dict[str, Any]:
        found = _fastest(names, shape, device)
        log.info("%s=auto chose backends %s for %s", KEY, found["choice"], json.dumps(facts, sort_keys=True))
        return found

    return recalled(memory, NAME, facts, _is_answer, measure)["choice"]


def recalled(
    memory: Memory | None, name: str, facts: Mapping[str, Any], is_answer: Callable[[Any], bool],
    measure: Callable[[], dict[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """Return the stored choice for ``facts`` if valid; else measure, store and return one."""
    known = None if memory is None else memory.recall(name, facts)
    if known is not None and is_answer(known):
        return dict(known)
    found = measure()
    valid = found if memory is None else memory.remember(name, facts, found)
    return valid if is_answer(valid) else found


def _checked(requested: str, reasons: dict[str, str | None]) -> str:
    names = requested.split(",")
    valid = [name for name, reason in reasons.items() if reason is None]
    if len(names) not in (1, len(DIRECTIONS)) or not set(names) <= set(reasons):
        raise ConfigError(f"{KEY}={requested} is not known; use one of: {', '.join(['auto', *valid])}")
    for name in names:
        if reasons[name]:
            raise ConfigError(f"{KEY}={requested}: {name} {reasons[name]}; use one of: {', '.join(valid)}")
        require_package(KEY, name)
    return ",".join(names * len(DIRECTIONS) if len(names) == 1 else names)


def _fastest(names: list[str], shape: MlpShape, device: torch.device) -> dict[str, Any]:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{KEY}=auto cannot measure inside a graph capture: choose the backends before it")
    times: dict[str, dict[str, float]] = {direction: {} for direction in DIRECTIONS}
    for direction in DIRECTIONS:
        for name, found in milliseconds(names, direction, shape, device).items():
            if isinstance(found, Exception):
                log.warning("%s=auto leaves out %s for %s, as it failed: %s", KEY, name, direction, found)
            else:
                times[direction][name] = found
    for direction, measured in times.items():
        if not measured:
            raise ConfigError(
                f"{KEY}=auto: none of {', '.join(names)} could run the {direction}; see the log, or choose "
                f"one without measuring: {KEY}={names[0]}"
            )
    choice = ",".join(min(measured, key=measured.__getitem__) for measured in times.values())
    return {"choice": choice, "milliseconds": times}


def milliseconds(
    backends: Sequence[str], direction: str, shape: MlpShape, device: torch.device
) -> dict[str, float | Exception]:
    """Return each backend's median ms in one direction on a random routing, or its error."""
    generator = torch.Generator(device).manual_seed(0)
    weight_TK, plan = random_routing(shape, generator)
    op, last = direction, []
    try:
        inputs = random_inputs(direction, shape, weight_TK, plan, generator)
        if direction == "wgrad":
            sizes = (shape.E, 2 * shape.F, shape.D), (shape.E, shape.D, shape.F)
            inputs += [torch.empty(size, device=device) for size in sizes]
            op, last = "wgrad_into", [False]
    except torch.OutOfMemoryError as error:
        return dict.fromkeys(backends, error.with_traceback(None))
    failed: dict[str, float | Exception] = {}

    def call(name: str) -> None:
        if name not in failed:
            try:
                call_op(op, *inputs, name, *last)
            except Exception as error:
                failed[name] = error.with_traceback(None)  # a traceback would keep the inputs alive

    # in turns, since a GPU's clock changes under load
    calls = {name: functools.partial(call, name) for name in backends}
    for run in calls.values():
        for _ in range(WARM_UP_CALLS):
            run()
    times = time_in_turns({n: run for n, run in calls.items() if n not in failed}, REPEATS, device)
    return {name: statistics.median(every) for name, every in times.items()} | failed


def call_op(direction: str, *arguments: Any) -> Any:
    name = "grouped_mlp" if direction == "forward" else f"grouped_mlp_{direction}"
    return getattr(torch.ops.graphmoe, name)(*arguments)


def random_routing(
    shape: MlpShape, generator: torch.Generator
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return routing weights [T, K] and routing plan of tokens routed by a softmax of random logits."""
    logits_TE = torch.randn(shape.T, shape.E, generator=generator, device=generator.device)
    weight_TK, expert_TK = logits_TE.softmax(-1).topk(min(shape.K, shape.E))
    _, ends_E, row_TK, slot_R = torch.ops.graphmoe.routing_plan(expert_TK.int(), shape.E)
    return weight_TK.contiguous(), (slot_R, row_TK, ends_E)


def random_inputs(
    direction: str, shape: MlpShape, weight_TK: Tensor, plan: tuple[Tensor, Tensor, Tensor],
    generator: torch.Generator,
) -> list[Tensor]:  # fmt: skip
    """Return the arguments of `call_op` that precede the backend, filled with random normal numbers."""

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        numbers = torch.randn(size, generator=generator, device=generator.device)
        return numbers.mul_(scale).to(shape.dtype)

    T, D, F, E, R = shape.T, shape.D, shape.F, shape.E, len(plan[0])
    if direction == "wgrad":
        return [normal(T, D), normal(T, D), normal(R, 2 * F), normal(R, F), *plan]
    weights = [normal(E, 2 * F, D, scale=D**-0.5), normal(E, D, F, scale=F**-0.5), weight_TK]
    if direction == "dgrad":
        return [normal(T, D), normal(R, 2 * F), *weights, *plan]
    return [normal(T, D), *weights, *plan]


def _facts(shape: MlpShape, device: torch.device, names: list[str]) -> dict[str, Any]:
    return {
        "shape": str(shape),
        "backends": names,
        "packages": {name: packages.version_of(VENDORS[name].module) for name in names if name in VENDORS},
        **machine_facts(device),
    }


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Return the facts, other than sizes, that affect times: device, versions, hash of the sources."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "triton": triton_version(),
        "source": _source_hash(),
    }


@functools.cache
def _source_hash() -> str:
    folder, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _is_answer(entry: Any) -> bool:
    names = entry.get("choice", "").split(",") if isinstance(entry, dict) else []
    return len(names) == len(DIRECTIONS) and set(names) <= set(BACKENDS)
