"""Choice of the GEMMs to run in fp8: those faster than in bf16, forward and gradients together.

Each is timed once per size and device, and the choice is stored, as in `ops.grouped_mlp.choice`. Suffixes: R
rows, N outputs and K inputs of a weight; others as in `ops.fp8_mlp`.
"""

import functools
import logging
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmoe.config.formats import FORMATS
from graphmoe.config.schema import ConfigError
from graphmoe.ops import fp8_mlp  # noqa: F401  # registers the operations
from graphmoe.ops.formats import KERNELS
from graphmoe.ops.fp8 import GRADIENT, INPUT
from graphmoe.ops.grouped_mlp.choice import (
    Memory,
    MlpShape,
    machine_facts,
    random_inputs,
    random_routing,
    recalled,
)
from graphmoe.ops.timing import WARM_UP_CALLS, Call, time_in_turns

log = logging.getLogger(__name__)
ops = torch.ops.graphmoe
KEY = "precision.fp8_measure"
NAME = "fp8"  # of stored answers
EXPERTS = "experts"
PAYS = 1.02  # least speedup over bf16 that selects fp8
REPEATS = 20
FORMS = ("plain", "fp8", "weights")  # timed calls: in bf16, in fp8, and quantizing the weights, once a step


class InBf16(NamedTuple):
    """The GEMMs that stay in bf16, though `precision.fp8_products` names them, as fp8 was not faster."""

    shapes: tuple[tuple[int, int], ...] = ()  # weights [N, K] of dense GEMMs
    experts: bool = False


ALL_IN_FP8 = InBf16()


@dataclass(frozen=True)
class Dense:
    """A dense GEMM to time: R rows with a weight [N, K], and its gradients."""

    R: int
    N: int
    K: int
    wgrad: str  # format of the weight gradient, as in `ops.formats.linear`
    dtype: torch.dtype = torch.bfloat16
    recipe: str = "rowwise"  # key of `ops.formats.KERNELS`

    def calls(self, device: torch.device) -> dict[str, Call]:
        """Return the calls to time, on random inputs, by their names in `FORMS`."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device).to(self.dtype)

        x, dy, w = normal(self.R, self.K), normal(self.R, self.N), normal(self.N, self.K)

        def plain() -> Any:
            return x @ w.t(), dy @ w, dy.t() @ x

        by = KERNELS[self.recipe]
        along, turned = by.weight(w), by.transposed(w)
        stored, gradient = by.quantize(x, w, INPUT), by.quantize(dy, w, GRADIENT)

        # a compiled graph fuses this quantization with its producer; fp8_rows moves as many bytes
        def in_fp8() -> Any:
            q, _ = ops.fp8_rows(x), ops.fp8_rows(dy)
            by.product(stored, along, self.dtype)
            by.product(gradient, turned, self.dtype)
            return dy.t() @ q[0].to(self.dtype) if self.wgrad == "bf16" else by.wgrad(gradient, stored)

        def weights() -> Any:
            return by.weight(w), by.transposed(w)

        return dict(zip(FORMS, (plain, in_fp8, weights), strict=True))


@dataclass(frozen=True)
class Experts:
    """The routed experts of a layer to time, and their gradients."""

    shape: MlpShape
    backends: str  # of the bf16 experts
    recipe: str = "rowwise"

    def calls(self, device: torch.device) -> dict[str, Call]:
        """Return calls to time, by names in `FORMS`, on random routing; wgrad stores fp32 as in a step."""
        shape, generator = self.shape, torch.Generator(device).manual_seed(0)
        weight_TK, plan = random_routing(shape, generator)
        x, gate_up, down, *_ = random_inputs("forward", shape, weight_TK, plan, generator)
        dy, layer = torch.randn_like(x), (gate_up, down, weight_TK, *plan)
        totals = [torch.empty(each.shape, device=device) for each in (gate_up, down)]
        recipe, by, is_delayed = self.recipe, KERNELS[self.recipe], FORMATS[self.recipe].is_delayed
        forms = by.weight, by.transposed
        along, turned = ([*f(gate_up), *f(down)] for f in forms)
        known = [torch.ones(1, device=device)] * 3 if is_delayed else [None] * 3

        def plain() -> None:
            _, h = ops.grouped_mlp(x, *layer, self.backends)
            _, _, *made = ops.grouped_mlp_dgrad(dy, h, *layer, self.backends)
            ops.grouped_mlp_wgrad_into(dy, x, *made, *plan, *totals, self.backends, False)

        def in_fp8() -> None:
            stored = ops.fp8_rows(x) if is_delayed else by.quantize(x, gate_up, INPUT)
            _, *h, _ = ops.fp8_mlp_forward(*stored, *along, weight_TK, *plan, shape.dtype, recipe, *known[:2])
            gradient = ops.fp8_rows(dy) if is_delayed else by.quantize(dy, down, GRADIENT)
            _, _, *made, _ = ops.fp8_mlp_dgrad(
                *gradient, *h, *turned, weight_TK, *plan, shape.dtype, recipe, *known
            )
            ops.fp8_mlp_wgrad_into(*gradient, *stored, *made, *plan, *totals, recipe, False)

        def weights() -> Any:
            return [form(each) for each in (gate_up, down) for form in forms]

        return dict(zip(FORMS, (plain, in_fp8, weights), strict=True))


def speeds(
    products: Mapping[str, Dense | Experts], num_micro_batches: int, device: torch.device,
    memory: Memory | None,
) -> dict[str, float]:  # fmt: skip
    """Return the speedup of each GEMM in fp8 over bf16, including quantization.

    Without ``memory`` no time is stored. Syncs the device, so it cannot run in a capture. Raises ConfigError
    if the device is out of memory.
    """
    found = {}
    for name, each in products.items():
        facts = {"product": str(each), **machine_facts(device)}
        ms = recalled(memory, NAME, facts, _is_answer, functools.partial(_measured, name, each, device))
        found[name] = ms["plain"] / (ms["fp8"] + ms["weights"] / num_micro_batches)
    return found


def slower(found: Mapping[str, float]) -> list[str]:
    """Return the names of GEMMs that stay in bf16, because fp8 is less than `PAYS` times as fast."""
    return [name for name, speed in found.items() if speed < PAYS]


def to_text(found: Mapping[str, float]) -> str:
    """Return a text: how many GEMMs run in fp8, and the names and speedups of the others."""
    left = slower(found)
    those = f"; bf16 for: {', '.join(f'{name} ({found[name]:.2f}x)' for name in left)}" if left else ""
    return f"fp8 in {len(found) - len(left)} of {len(found)} products{those}"


def _measured(name: str, of: Dense | Experts, device: torch.device) -> dict[str, float]:
    try:
        calls = of.calls(device)
        for call in calls.values():
            for _ in range(WARM_UP_CALLS):
                call()
        times = time_in_turns(calls, REPEATS, device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"{KEY}=auto has no memory to time {name} ({error}); use {KEY}=none") from None
    found = {form: statistics.median(every) for form, every in times.items()}
    log.info("%s=auto timed %s: %s", KEY, name, ", ".join(f"{of} {ms:.3f} ms" for of, ms in found.items()))
    return found


def _is_answer(entry: Any) -> bool:
    numbers = entry.values() if isinstance(entry, dict) and entry.keys() == {*FORMS} else [0.0]
    return all(isinstance(ms, float) and ms > 0 for ms in numbers)
