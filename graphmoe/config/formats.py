"""Properties of the number formats of fp8 GEMMs; ``graphmoe.ops.formats.KERNELS`` has their kernels."""

import enum
from collections.abc import Callable
from typing import Literal, NamedTuple

Fp8Recipe = enum.StrEnum("Fp8Recipe", ("none", "auto", "rowwise", "tensorwise", "blockwise", "mxfp8"))


class Gpu(NamedTuple):
    gfx: str = ""  # such as gfx942; empty on NVIDIA
    major: int = 0  # NVIDIA compute capability; 0 on AMD
    cuda: tuple[int, ...] = ()


class TurboScales(NamedTuple):
    """Arguments for Primus-Turbo's ``Float8QuantConfig``, and limits of its GEMMs."""

    granularity: str
    block_size: int | None = None
    scale_dtype: str = "FP32"
    transposes: bool = True  # False if its GEMMs take weights only as [E, N, C]
    needs: str = ""  # format whose device requirements apply; empty: its own


class Format(NamedTuple):
    needs: str  # supported GPUs, for errors
    runs_on: Callable[[Gpu], bool]
    turbo: TurboScales
    aligned: int = 16  # divisor of weight sizes (aten/src/ATen/native/cuda/ScaledBlas.cpp)
    block: int | None = None  # elements per scale along a row; None: all
    hidden_block: int = 128  # elements per scale of saved gate and up
    scale_bytes: int = 4
    is_delayed: bool = False  # activations are scaled by earlier steps' amax
    dispatched: bool = False  # dispatched tokens can have this format
    # assumed: as rowwise; unknown: projections reject it
    rates: Literal["measured", "assumed", "unknown"] = "unknown"
    why_no_experts: str = ""  # why experts cannot use it; empty if they can


_HOPPER_OR_MI300 = "a GPU of compute capability 9.0 or more, or an MI300 or newer"


def _is_hopper_or_mi300(gpu: Gpu) -> bool:
    return gpu.gfx >= "gfx942" or gpu.major >= 9


FORMATS = {
    "rowwise": Format(
        _HOPPER_OR_MI300, _is_hopper_or_mi300, TurboScales("ROWWISE"), dispatched=True, rates="measured"
    ),
    "tensorwise": Format(
        _HOPPER_OR_MI300, _is_hopper_or_mi300, TurboScales("TENSORWISE"), is_delayed=True, rates="assumed"
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


def automatic_format(gpu: Gpu) -> str | None:
    """Return the format of ``precision.fp8=auto`` on a GPU: the finest blocks that it has, else rows."""
    return next((name for name in ("mxfp8", "rowwise") if FORMATS[name].runs_on(gpu)), None)
