"""fp8 quantization with power-of-two scales: per tensor, row, or block of columns.

Suffixes: R rows, C columns, B blocks of `BLOCK` columns; q are quantized values, value = q * scale. Scaling
is exact, so a value is rounded once.
"""

import torch
from torch import Tensor

from graphmoe.config.formats import FORMATS, Gpu

BLOCK = 128
Stored = tuple[Tensor, Tensor]  # quantized values and their scales
SMALLEST = 2.0**-126  # smallest scale, and product of two scales in row sums: normal, with a finite inverse


def fp8_dtype() -> torch.dtype:
    """Return e4m3fnuz (up to 240) on gfx942, else e4m3fn (up to 448)."""
    return torch.float8_e4m3fnuz if _is_fnuz() else torch.float8_e4m3fn


def wide_dtype() -> torch.dtype:
    """Return e5m2fnuz on gfx942, else e5m2: versus `fp8_dtype`, 1 mantissa bit less, 2^14 times the range."""
    return torch.float8_e5m2fnuz if _is_fnuz() else torch.float8_e5m2


def _is_fnuz() -> bool:
    if not (torch.version.hip and torch.cuda.is_available()):
        return False
    name: str = torch.cuda.get_device_properties(0).gcnArchName
    return name.startswith("gfx94")


def recipes_of(device: torch.device) -> tuple[str, ...]:
    """Return the fp8 recipes (precision.fp8) that a device supports; a CPU emulates all."""
    if device.type != "cuda":
        return tuple(FORMATS)
    gpu = gpu_of(device)
    return tuple(name for name, each in FORMATS.items() if each.runs_on(gpu))


def gpu_of(device: torch.device) -> Gpu:
    if torch.version.hip:
        return Gpu(gfx=torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0])
    cuda = tuple(map(int, (torch.version.cuda or "0").split(".")[:2]))
    return Gpu(major=torch.cuda.get_device_capability(device)[0], cuda=cuda)


def reason_against(device: torch.device, recipe: str) -> str | None:
    """Return why a device cannot run a recipe and what to use instead; None if it can."""
    has = recipes_of(device)
    if recipe in has:
        return None
    if torch.version.hip:
        this = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    else:
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        this = f"one of {capability} with CUDA {torch.version.cuda}"
    words = " or ".join([*has, "none"])
    return f"needs {FORMATS[recipe].needs}, and this is {this}; use precision.fp8={words}"


def rounding_of(dtype: torch.dtype) -> tuple[int, int]:
    """Return (a, b) by which a scale's biased exponent is ((bits of the fp32 maximum + a) >> 23) - b."""
    # The largest number is 1.75 * 2^8, 1.875 * 2^7, or 1.75 * 2^15: a larger fraction needs the next power.
    return {torch.float8_e4m3fn: (0x1FFFFF, 8), torch.float8_e4m3fnuz: (0x0FFFFF, 7)}.get(
        dtype, (0x1FFFFF, 15)
    )


def scales_of(amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the scale for fp32 ``amax``, the least power of two that avoids overflow, and its inverse.

    The scale is at least `SMALLEST`. Both are NaN if amax is not finite.
    """
    above, exponent = rounding_of(dtype)
    powers = (((amax.view(torch.int32) + above) >> 23) - exponent).clamp(min=1)  # SMALLEST
    zero = nan_unless_finite(amax)
    return (powers << 23).view(torch.float32) + zero, ((254 - powers) << 23).view(torch.float32) + zero


def nan_unless_finite(amax: Tensor) -> Tensor:
    """Return 0 if amax is finite, else NaN: a saturating cast to fp8 would hide an infinity."""
    # a NaN constant would prevent common-subexpression elimination (torch/_functorch/compile_utils.py)
    return amax - amax


def quantise(x_RC: Tensor, dtype: torch.dtype, *, whole: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize x by rows -> q [..., R, C] and fp32 scales [..., R, 1], equal in each matrix if ``whole``."""
    amax = x_RC.abs().amax((-2, -1) if whole else -1, keepdim=True).float()
    scale_R1, inverse_R1 = scales_of(amax.expand(*x_RC.shape[:-1], 1), dtype)
    return (x_RC.float() * inverse_R1).to(dtype), scale_R1


def saturated(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantize x by the given scale, clamped to the range of ``dtype``; infinities and NaN become NaN."""
    most = torch.finfo(dtype).max
    scaled = x.float() * (1 / scale)  # 1 / scale is a power of two, so nothing is rounded
    within = scaled.clamp(-most, most)
    return within.where(scaled.abs() < torch.inf, torch.nan).to(dtype)


def quantise_blocks(x_RC: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize x by blocks of columns -> q [R, C] and fp32 scales [R, B]; the last block may be narrower."""
    rows, columns = x_RC.shape
    padded = torch.nn.functional.pad(x_RC, (0, -columns % BLOCK)).view(rows, -1, BLOCK)
    q_RBC, scale_RB1 = quantise(padded, dtype)
    return q_RBC.view(rows, -1)[:, :columns].contiguous(), scale_RB1.squeeze(-1)


def block_values(q_RC: Tensor, scale_RB: Tensor) -> Tensor:
    """Dequantize the result of `quantise_blocks` to fp32 [R, C]."""
    return q_RC.float() * scale_RB.repeat_interleave(BLOCK, -1)[:, : q_RC.shape[-1]]


def rounded(total: Tensor, dtype: torch.dtype) -> Tensor:
    return total if total.dtype == dtype else torch.ops.prims.convert_element_type(total, dtype)


def given(x_RC: Tensor, scale: Tensor, largest: Tensor, wide: bool) -> tuple[Tensor, Tensor]:
    """Quantize x by the given scale [1], to e5m2 if ``wide``; return q and max(``largest``, abs(x)) [1]."""
    dtype = wide_dtype() if wide else fp8_dtype()
    # rows first: Inductor fuses their maxima with the rows' producer
    return saturated(x_RC, scale, dtype), torch.maximum(largest, x_RC.abs().amax(-1).amax().float())


FIRST_SCALE = 2.0**-2  # initial delayed scale: up to 112
# operations that return the delayed scale of a weight's input, and of its output gradient
INPUT, GRADIENT = "fp8_scale_of_input", "fp8_scale_of_gradient"


def delayed(x_RC: Tensor, w: Tensor, side: str) -> tuple[Tensor, Tensor]:
    """Quantize x, the input or output gradient (``side``) of ``w``; return q and the side's delayed scale."""
    scale, largest = getattr(torch.ops.graphmoe, side)(w)
    return torch.ops.graphmoe.fp8_given(x_RC, scale, largest, side == GRADIENT)[0], scale


def _first(w: Tensor) -> tuple[Tensor, Tensor]:
    return w.new_full((1,), FIRST_SCALE, dtype=torch.float32), w.new_zeros(1, dtype=torch.float32)


_given = torch.library.custom_op("graphmoe::fp8_given", given, mutates_args=())
_given.register_fake(
    lambda x_RC, scale, largest, wide: (
        torch.empty_like(x_RC, dtype=wide_dtype() if wide else fp8_dtype()),
        torch.empty_like(largest),
    )
)
for _name in (INPUT, GRADIENT):
    torch.library.custom_op(f"graphmoe::{_name}", _first, mutates_args=()).register_fake(
        lambda w: (w.new_empty(1, dtype=torch.float32), w.new_empty(1, dtype=torch.float32))
    )
