"""Lower bounds on kernel times: 16-bit GEMMs by shape, copies and memsets by bytes.

Traces have no shapes of fused kernels and of graph launches, so their bounds are unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from graphmoe.plan.costs.hardware import CARDS, device_words, peak_tflops
from graphmoe.trace.events import Activity, HostEvent, Trace

# operations, and the index of their first matrix input
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::_grouped_mm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
_HALF = ("c10::BFloat16", "c10::Half")
_BYTES = 2
# (words of the device's name, TB/s) by NVIDIA's and AMD's data sheets, for devices without projected rates.
# Specific names are first, and include variants of a projected card, whose name they contain.
_OTHER_BANDWIDTHS: tuple[tuple[str, float], ...] = (
    ("MI350X", 8.0),
    ("H100 PCIE", 2.0),
    ("H100 NVL", 3.9),
    ("H20", 4.0),
    ("A100 80GB PCIE", 1.935),
    ("A100 80GB", 2.039),
    ("L40S", 0.864),
)


@dataclass(frozen=True)
class Device:
    """Peaks of a device; None for an unknown one."""

    flops_per_us: float | None  # FLOPs of 16-bit GEMMs
    bytes_per_us: float | None

    @classmethod
    def of(cls, trace: Trace) -> Device:
        name = trace.device or ""
        peak = trace.facts.get("peak_tflops") or peak_tflops(name)
        bandwidth = _tb_per_s(name)
        return cls(peak * 1e6 if peak else None, bandwidth * 1e6 if bandwidth else None)

    def of_activity(self, activity: Activity) -> float | None:
        """Return the least microseconds of a memset, or a copy within the device."""
        if activity.num_bytes is None or self.bytes_per_us is None:
            return None
        if activity.kind == "memset":
            return activity.num_bytes / self.bytes_per_us
        return 2 * activity.num_bytes / self.bytes_per_us if "DtoD" in activity.name else None

    def of_operation(self, operation: HostEvent) -> float | None:
        """Return the least microseconds of a torch operation."""
        shape = product_shape(operation)
        if shape is None or self.flops_per_us is None:
            return None
        flops, num_elements = shape
        moved = num_elements * _BYTES / self.bytes_per_us if self.bytes_per_us else 0.0
        return max(flops / self.flops_per_us, moved)


def product_shape(operation: HostEvent) -> tuple[float, float] | None:
    """Return FLOPs and elements moved of a 16-bit GEMM; None for others."""
    first = _PRODUCTS.get(operation.name)
    dims, types = operation.args.get("Input Dims"), operation.args.get("Input type")
    if first is None or not dims or not types or len(dims) < first + 2:
        return None
    left, right = dims[first : first + 2]
    if not all(kind in _HALF for kind in types[first : first + 2]) or not _is_product(left, right):
        return None
    if len(left) == 2 and len(right) == 3:  # rows of one matrix, each group times a matrix of its own
        made = [left[0], right[2]]
    elif operation.name == "aten::_grouped_mm" and len(left) == 2:  # groups of columns: one result each
        return 2.0 * left[0] * left[1] * right[1], float(math.prod(left) + math.prod(right))
    else:
        made = [*left[:-1], right[-1]]
    elements = math.prod(left) + math.prod(right) + math.prod(made)
    return 2.0 * math.prod(made) * left[-1], float(elements)


def _tb_per_s(device_name: str) -> float | None:
    words = device_words(device_name)
    if "MIG" in words:
        return None
    of_cards = ((card.name, card.hbm_tb_per_s) for card in CARDS.values())
    known = (*_OTHER_BANDWIDTHS, *of_cards)
    return next((tb_per_s for needed, tb_per_s in known if words.issuperset(needed.split())), None)


def _is_product(left: Sequence[int], right: Sequence[int]) -> bool:
    fit = len(left) in (2, 3) and len(right) in (2, 3) and len(left) <= len(right)
    return fit and all(type(size) is int for size in (*left, *right)) and left[-1] == right[-2]
