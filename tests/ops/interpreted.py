"""Backends that a file of tests runs an operation on, and its second run in Triton's interpreter.

``BACKENDS`` are plain PyTorch and, on a GPU, its kernels; ``KERNELS`` the kernels alone. Triton decides at
import whether it interprets, for the whole process: `tests/ops/test_kernels.py` runs each file that imports
this once more with TRITON_INTERPRET=1, where both lists are the kernels on CPU tensors. By hand:
``TRITON_INTERPRET=1 python -m pytest -k interpreted tests/ops/test_swiglu.py``.

The interpreter's limits (Triton 3.6): with numpy 2.4 or later, loops over kernel arguments fail; a bf16
``tl.dot`` returns garbage (cast its operands to fp32 there, by a constexpr); a cast of fp32 to bf16 cuts off
the low bits, which devices round; a cast to 8 bits drops a carry into the exponent, one from 8 bits makes
NaN a number, and one from bf16 loses subnormals (torch casts here instead); and it is slow, about 0.1 ms for
each operation of each program.
"""

import functools
import inspect
import math
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
NEEDS_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
CUDA = pytest.param("cuda", marks=NEEDS_GPU)
BACKENDS = ["interpreted"] if INTERPRETING else ["plain", CUDA]
KERNELS = ["interpreted"] if INTERPRETING else [CUDA]


def in_turn(values: Sequence[Any], number: int) -> Sequence[Any]:
    """Values that meet another axis of a table at ``number``: all, but in the interpreter one in turn."""
    return [values[number % len(values)]] if INTERPRETING else values


def _cast_by_torch() -> None:
    """Let torch cast fp32 to 8 bits, and 8 bits and bf16 to fp32, in the interpreter."""
    import numpy as np
    from triton.runtime import interpreter

    plain = interpreter._convert_float
    kinds = {"fp8e4nv": torch.float8_e4m3fn, "fp8e4b8": torch.float8_e4m3fnuz}
    kinds |= {"fp8e5": torch.float8_e5m2, "fp8e5b16": torch.float8_e5m2fnuz}
    short = kinds | {"bf16": torch.bfloat16}

    def convert(value: Any, before: Any, after: Any, rounding: Any) -> Any:
        if str(before) in short and after.primitive_bitwidth == 32:
            return torch.from_numpy(np.ascontiguousarray(value)).view(short[str(before)]).float().numpy()
        if str(after) not in kinds or before.primitive_bitwidth != 32:
            return plain(value, before, after, rounding)
        numbers = torch.from_numpy(np.ascontiguousarray(value).view(np.float32))
        return numbers.to(kinds[str(after)]).view(torch.uint8).numpy()

    interpreter._convert_float = convert


def _look_up_once() -> None:
    """Look once for what calls of device functions patch, and make each shape once: a third of the time."""
    from triton.language import core
    from triton.runtime import interpreter

    @functools.cache
    def names(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]

    def patch(package: Any, builder: Any, scope: Any) -> None:
        for name in names(package):
            if core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    @functools.cache
    def of_block(shape: tuple[int, ...]) -> dict[str, Any]:
        block = object.__new__(core.block_type)
        plain_block(block, core.float32, [*shape])
        return {"shape": block.shape, "numel": block.numel}

    @functools.cache
    def of_tensor(shape: tuple[int, ...]) -> dict[str, Any]:
        sizes = core.tuple([core.constexpr(size) for size in shape])
        return {"shape": sizes, "numel": core.constexpr(math.prod(shape))}

    def initialize_block(self: Any, element: Any, shape: Any) -> None:
        sizes = tuple(core._unwrap_if_constexpr(size) for size in shape)
        vars(self).update(of_block(sizes), element_ty=element, name=f"<{sizes}, {element}>")

    def initialize_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = (*type.shape,) if type.is_block() else ()
        vars(self).update(of_tensor(sizes), handle=handle, type=type, dtype=type.scalar)

    plain_block = core.block_type.__init__
    interpreter._patch_builtin = patch
    core.block_type.__init__, core.tensor.__init__ = initialize_block, initialize_tensor


if INTERPRETING:
    _cast_by_torch()
    _look_up_once()


def device_of(backend: str) -> str:
    return "cuda" if backend == "cuda" else "cpu"
