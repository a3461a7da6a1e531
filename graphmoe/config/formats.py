"""Number formats of products in 8 bits: a row of `FORMATS` each, with the facts that are no kernels.

``graphmoe.ops.formats.KERNELS`` has a row of the same name with what is computed. These two rows and the name
in `Fp8Recipe` are all that a format needs; docs/precision.md describes it.
"""

import enum
from collections.abc import Callable
from typing import Literal, NamedTuple

Fp8Recipe = enum.StrEnum("Fp8Recipe", ("none", "rowwise", "tensorwise", "blockwise", "mxfp8"))


class Gpu(NamedTuple):
    """Facts that decide whether a GPU has the products of a format."""

    gfx: str = ""
    """Architecture of a GPU of AMD, such as gfx942."""
    major: int = 0
    """Compute capability of a GPU of NVIDIA, and the version of CUDA."""
    cuda: tuple[int, ...] = ()


class TurboScales(NamedTuple):
    """The format in Primus-Turbo's ``Float8QuantConfig``."""

    granularity: str
    block_size: int | None = None
    scale_dtype: str = "FP32"
    transposes: bool = True
    """False if it multiplies by weights [E, N, C] alone."""
    needs: str = ""
    """Format whose devices it runs on, if not its own."""


class Format(NamedTuple):
    """Scales of a format, where it runs, and what is known of its costs."""

    needs: str
    """Devices with its products, beside a CPU; `runs_on` decides by it."""
    runs_on: Callable[[Gpu], bool]
    turbo: TurboScales
    aligned: int = 16
    """Elements of which both sides of a weight are multiples. (aten/src/ATen/native/cuda/ScaledBlas.cpp)"""
    block: int | None = None
    """Numbers of a row that share a scale; None if all do."""
    hidden_block: int = 128
    """The same of gate and of up, which experts save for the backward."""
    scale_bytes: int = 4
    is_delayed: bool = False
    """True if activations have the scale of a tensor that earlier steps suggest, kept beside the weight."""
    travels: bool = False
    """True if dispatchers can move rows in it."""
    rates: Literal["measured", "assumed", "unknown"] = "unknown"
    """assumed are those of rowwise; `graphmoe.project` refuses a format of which they are unknown."""
    why_no_experts: str = ""
    """Reason why our kernels have no routed experts in it."""


_OF_ALL = "a GPU of compute capability 9.0 or more, or an MI300 or newer"
FORMATS = {
    "rowwise": Format(
        _OF_ALL,
        lambda gpu: gpu.gfx >= "gfx942" or gpu.major >= 9,
        TurboScales("ROWWISE"),
        travels=True,
        rates="measured",
    ),
    "tensorwise": Format(
        _OF_ALL,
        lambda gpu: gpu.gfx >= "gfx942" or gpu.major >= 9,
        TurboScales("TENSORWISE"),
        is_delayed=True,
        rates="assumed",
    ),
    "blockwise": Format(
        "a GPU of compute capability 9.0 and CUDA 12.9 or newer, the only ones with its products",
        lambda gpu: gpu.major == 9 and gpu.cuda >= (12, 9),
        TurboScales("BLOCKWISE", 128, needs="rowwise"),
        aligned=128,
        block=128,
        why_no_experts="has no kernels of experts that are faster than bf16",
    ),
    "mxfp8": Format(
        "instructions for blocks of 32: a GPU of compute capability 10.0 or 10.3, or an MI350 (gfx950)",
        lambda gpu: gpu.major == 10 or gpu.gfx == "gfx950",
        TurboScales("MX_BLOCKWISE", 32, "E8M0", transposes=False),
        aligned=32,
        block=32,
        hidden_block=32,
        scale_bytes=1,
    ),
}
"""Formats by their name in `Fp8Recipe`."""
