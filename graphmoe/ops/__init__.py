"""Operations of the model: reference, kernels, vendor adapters and the choice among them."""

import ctypes
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

from graphmoe.config.ranges import ConfigError

# State that operations look up when they run. Compiled graphs must not hold it: it differs from job to job.
# It belongs to the process, not to a thread: autograd runs backwards in its own.
IN_USE = SimpleNamespace(
    groups=None,  # `collectives.use_groups`
    shared={},  # `symm.axes.SharedAxis` of axes whose ranks read each other's memory
    exchange=None,  # `symm.use_peers`
    products=None,  # stream of GEMMs, `symm.peers.beside_products_on`
    waits=None,  # `waits.use_waits`
)
HALF_DTYPES = (torch.bfloat16, torch.float16)  # of flash attention, Primus-Turbo and Transformer Engine


def require_half(key: str, backend: str, dtype: torch.dtype) -> None:
    """Raise ConfigError, naming ``key`` and ``backend``, unless the dtype is bf16 or fp16."""
    if dtype not in HALF_DTYPES:
        raise ConfigError(
            f"{key}={backend} has bf16 and fp16 kernels only and the activations are {dtype}; "
            f"use precision.compute=bf16, or {key}=auto"
        )


def transformer_engine(module: str = "") -> Any:
    """Return ``transformer_engine.pytorch``, or a module of it such as ``.router``."""
    _load_cudnn_of_torch()
    return importlib.import_module(f"transformer_engine.pytorch{module}")


@functools.cache
def _load_cudnn_of_torch() -> None:
    # Transformer Engine prefers a cuDNN of the system, and a mix of two refuses every shape or fails to load.
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia and nvidia.submodule_search_locations) or ():
        for library in sorted(Path(folder, "cudnn", "lib").glob("libcudnn*.so.*")):
            os.environ.setdefault("CUDNN_HOME", str(library.parents[1]))
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def has_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.float32, *HALF_DTYPES)


def accumulator(x: Tensor) -> torch.dtype:
    """Return the dtype in which to sum values of x: fp32, or fp64 if x is fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def row_major(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors whose last axis is contiguous: copies of those whose axis is not."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def tile(columns: int, elements: int, widest: int, most_rows: int) -> tuple[int, int]:
    """Return (rows, columns), powers of two, of a tile of at most ``elements``, up to ``widest`` wide."""
    width = min(1 << max(columns - 1, 0).bit_length(), widest)
    return min(max(elements // width, 1), most_rows), width


def num_warps(threads: int) -> int:
    """Return the number of warps for this many threads: 32 each on NVIDIA, 64 on AMD; at least one."""
    return max(threads // (64 if torch.version.hip else 32), 1)


def triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def register_gradient(
    op: CustomOpDef, gradient: Callable[..., Any] | Sequence[Callable[..., Any]],
    saved: Callable[[Sequence[Any], Any], Sequence[Any]] = lambda inputs, _: inputs, results: int = 1,
) -> None:  # fmt: skip
    """Register ``gradient(*d_results, *saved(inputs, output))``, which returns gradients of the first inputs.

    If ``gradient`` is a sequence, each function returns one gradient and runs only if that is needed. Only
    the first ``results`` outputs are differentiable. ``saved`` returns tensors or None, then plain numbers.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(*(output[results:] if isinstance(output, tuple) else ()))
        way = saved(inputs, output)
        ctx.save_for_backward(*(x for x in way if x is None or isinstance(x, Tensor)))
        ctx.numbers = [x for x in way if not (x is None or isinstance(x, Tensor))]
        ctx.num_inputs = len(inputs)

    def backward(ctx: Any, *d_results: Tensor) -> tuple[Any, ...]:
        given = *d_results[:results], *ctx.saved_tensors, *ctx.numbers
        if callable(gradient):
            found = gradient(*given)
            found = found if isinstance(found, tuple) else (found,)
        else:
            wanted = zip(gradient, ctx.needs_input_grad, strict=False)
            found = tuple(each(*given) if needed else None for each, needed in wanted)
        return *found, *[None] * (ctx.num_inputs - len(found))

    op.register_autograd(backward, setup_context=keep)
