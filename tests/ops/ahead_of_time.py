"""Compilation of Triton kernels for four GPUs on a machine that has none, with facts about the code.

A file of tests lists calls in ``ahead_of_time_cases``, whose kernels are the cases (`launches_of`), and
`tests/ops/test_kernels.py` asserts on the facts. A child of the fork server compiles all cases of a module.
"""

import functools
import importlib
import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.forked import FORKS

ROOT = Path(__file__).parents[2]
TARGETS = {  # name: (backend, architecture, threads of a warp)
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
}
CROSSED = {"hopper": ("sm_100",), "instinct": ("gfx942",)}
"""Targets of layers whose code is that of another layer, on all targets, but for tails, biases and clamps."""
ON_NVIDIA_ONLY = ("tests.ops.test_symmetric_mm",)
"""Modules whose kernels a library replaces on AMD GPUs."""
TILES = ("BLOCK", "BLOCK_C", "BLOCK_M", "BLOCK_N", "BLOCK_R", "COLUMNS", "ROWS")
SIZES, OF_EXPERTS = ("C", "D", "F", "H", "M", "N"), ("BLOCK_E", "E", "K")
"""Names of constants of kernels."""
KINDS = {"float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5"}
KINDS |= {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
KINDS |= {"int32": "i32", "int64": "i64", "uint8": "u8"}


def launches_of(name: str, call: Callable[[], Any]) -> list[dict[str, Any]]:
    """Cases of the kernels that a call launches, which has tensors on the meta device.

    What a size of a launch is to Triton it is here: 1 is a constant, and 16 divides what it divides.
    """
    from unittest import mock

    from triton.runtime import JITFunction

    cases: list[dict[str, Any]] = []

    def kind_of(tensor: Any) -> str:
        return KINDS[str(tensor.dtype).removeprefix("torch.")]

    def record(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        values = dict(zip(kernel.arg_names, given, strict=False)) | named
        signature, constexprs = {}, {}
        for parameter in kernel.params:
            value = values[parameter.name]
            is_one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or is_one:
                constexprs[parameter.name] = value
            elif hasattr(value, "block_shape"):  # a tensor descriptor
                block = ", ".join(map(str, value.block_shape))
                signature[parameter.name] = f"tensordesc<{kind_of(value.base)}[{block}]>"
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            elif isinstance(value, int):
                whole = value % 16 == 0 and not parameter.do_not_specialize
                signature[parameter.name] = ("i64" if value >= 2**31 else "i32") + ":16" * whole
            else:
                signature[parameter.name] = f"*{kind_of(value)}:16"
        options = {key: named[key] for key in ("num_warps", "num_stages") if key in named}
        full_name = f"{kernel.__name__} {name}".strip()
        case = {"kernel": kernel, "name": full_name, "signature": signature, "constexprs": constexprs}
        cases.append(case | {"options": options})

    with mock.patch.object(JITFunction, "run", record):
        call()
    return cases


def launches_of_layers(layers: Mapping[str, Any], every_step: Callable[..., Any]) -> list[dict[str, Any]]:
    """Cases of all launches of the layers, one of those whose code differs in the values of sizes only."""
    cases: dict[str, dict[str, Any]] = {}
    for kind, targets in {"hopper": ("sm_90", "sm_100"), "instinct": ("gfx942", "gfx950")}.items():
        for shape, sizes in layers.items():
            for case in launches_of("", functools.partial(every_step, kind, *sizes)):
                if case["name"] in ("tiles_kernel", "weight_sums_kernel"):
                    continue  # of ops.grouped_mlp
                case["constexprs"] |= {"UPCAST": False} if "UPCAST" in case["constexprs"] else {}
                own = case | {"name": f"{case['name']} {len(cases)} {kind} {shape}", "only": targets}
                cases.setdefault(kind + _paths_of(case), own)
    return [*cases.values()]


def _paths_of(case: Mapping[str, Any]) -> str:
    """A text that is equal for cases with the same branches, tiles and types.

    A size decides whether tiles cover it, and its largest factor in a tile. The number of experts (E) and of
    slots of a token (K) decide a loop's end and a division; a block of experts is as large as E.
    """
    values = case["constexprs"]
    tile = max((n for name, n in values.items() if name in TILES), default=256)
    sizes = {name: math.gcd(values[name], tile) for name in SIZES if isinstance(values.get(name), int)}
    paths = {name: value for name, value in (values | sizes).items() if name not in OF_EXPERTS}
    return repr((case["name"], case["signature"], paths, case["options"]))


def compiled(module: str, target: str) -> dict[str, SimpleNamespace]:
    """Facts about each case of a module on one target, by the name of the case: only ``error`` if it has one.

    Otherwise ``shared_bytes``, ``spills`` (VGPRs on AMD, bytes of stack on NVIDIA), and what `COUNTED` names.
    """
    return {name: SimpleNamespace(**facts) for name, facts in _compile_elsewhere(module)[target].items()}


@functools.cache
def _compile_elsewhere(module: str) -> dict[str, dict[str, Any]]:
    with ProcessPoolExecutor(1, mp_context=FORKS) as pool:
        return pool.submit(_facts_of, module).result()


def _facts_of(module: str) -> dict[str, dict[str, Any]]:
    """Compile all cases of a module for all targets; runs in the other process."""
    facts: dict[str, dict[str, Any]] = {target: {} for target in TARGETS}
    for case in importlib.import_module(module).ahead_of_time_cases():
        for target in case.get("only", TARGETS):
            assert case["name"] not in facts[target], f"{module}: two cases of one name: {case['name']}"
            facts[target][case["name"]] = _compile_case(case, target)
    targets = [target for target in TARGETS if target.startswith("sm") or module not in ON_NVIDIA_ONLY]
    assert all(facts[target] for target in targets), f"{module} lists no case for a target: {facts}"
    return facts


def _compile_case(case: dict[str, Any], target: str) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, attrs = {}, {}
    for number, argument in enumerate(case["kernel"].arg_names):
        kind, divisible, _ = case["signature"].get(argument, "constexpr").partition(":16")
        if target == "gfx942":
            kind = kind.replace("fp8e4nv", "fp8e4b8").replace("fp8e5", "fp8e5b16")
        signature[argument] = kind
        attrs |= {(number,): [["tt.divisibility", 16]]} if divisible else {}
    source = ASTSource(fn=case["kernel"], signature=signature, constexprs=case["constexprs"], attrs=attrs)
    options = dict(case["options"])
    if "num_warps" in options:  # those of 32 threads
        options["num_warps"] = max(32 * options["num_warps"] // TARGETS[target][2], 1)
    try:
        built = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    except Exception as error:  # whatever the compiler raises is the result of the test
        return {"error": f"{type(error).__name__}: {error}"}
    is_amd = TARGETS[target][0] == "hip"
    text = built.asm["amdgcn" if is_amd else "ptx"]
    used = text if is_amd else _resources(built.asm["cubin"])
    spills = max(map(int, re.findall(r"(?:\.vgpr_spill_count:\s+|\bSTACK:)(\d+)", used)), default=0)
    counts = {name: len(re.findall(pattern, text)) for name, pattern in COUNTED[TARGETS[target][0]].items()}
    return {"error": "", "shared_bytes": built.metadata.shared, "spills": spills, **counts}


WIDE = r"\.global[\w.:]*\.(v4\.[bfsu]32|v2\.[bfsu]64|v8\.[bfsu]32|v4\.[bfsu]64)"
COUNTED = {  # backend: patterns of instructions; wide ones move 16 bytes between global memory and registers,
    # with triton 3.9 on gfx950 to shared memory too, and scaled ones take scales of blocks of 32
    "hip": {
        "matrix_ops": r"\bv_mfma",
        "scaled_ops": r"\bv_mfma_scale",
        "wide_loads": r"\b(global|buffer)_load_(lds_)?dwordx4",
        "wide_stores": r"\b(global|buffer)_store_dwordx4",
        "atomics": r"\b(global|buffer)_atomic",
    },
    "cuda": {
        "matrix_ops": r"\b(wgmma\.mma|mma\.sync|tcgen05\.mma)",
        "scaled_ops": r"\btcgen05\.mma[\w.:]*block_scale",
        "wide_loads": rf"\bld{WIDE}",
        "wide_stores": rf"\bst{WIDE}",
        "atomics": r"\b(atom|red)\.[\w.]*global",
    },
}


def _resources(cubin: bytes) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.check_output([knobs.nvidia.cuobjdump.path, "-res-usage", file.name], text=True)
