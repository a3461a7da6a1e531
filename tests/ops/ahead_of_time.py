"""Compilation of Triton kernels for four GPUs on a machine that has none, with facts about the code.

A file of tests lists a few representative calls in a function ``ahead_of_time_cases``, whose kernels are the
cases (`launches_of`). `tests/ops/test_kernels.py` finds it, and asserts on the facts.

All cases of a module are compiled in one fresh process: one with TRITON_INTERPRET=1 can't compile.
"""

import fcntl
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TARGETS = {  # name: (backend, architecture, threads of a warp)
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
}


@dataclass(frozen=True)
class Facts:
    """Machine code of one case on one target."""

    case: str
    target: str
    error: str = ""
    """Reason why the case did not compile; all fields below are then empty."""
    shared_bytes: int = 0
    spills: int = 0
    """VGPRs on AMD, bytes of stack on NVIDIA."""
    matrix_ops: int = 0
    """Matrix instructions: v_mfma*, mma.sync, wgmma or tcgen05.mma."""
    scaled_ops: int = 0
    """Matrix instructions that take scales of blocks of 32: v_mfma_scale* or tcgen05.mma block_scale."""
    wide_loads: int = 0
    """Loads of 16 bytes from global memory to registers, with triton 3.9 on gfx950 to shared memory too."""
    wide_stores: int = 0
    """Stores of 16 bytes from registers to global memory."""
    atomics: int = 0
    """Atomic instructions on global memory."""


KINDS = {
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
}


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
    cases = []
    for kind, targets in {"hopper": ("sm_90", "sm_100"), "instinct": ("gfx942", "gfx950")}.items():
        for shape, sizes in layers.items():
            for case in launches_of("", functools.partial(every_step, kind, *sizes)):
                if case["name"] in ("tiles_kernel", "weight_sums_kernel"):
                    continue  # of ops.grouped_mlp
                case["constexprs"] |= {"UPCAST": False} if "UPCAST" in case["constexprs"] else {}
                cases.append(case | {"name": f"{case['name']} {len(cases)} {kind} {shape}", "only": targets})
    return cases


def compiled(module: str, target: str) -> dict[str, Facts]:
    """Facts about each case of a module on one target, by the name of the case."""
    facts = {fact.case: fact for fact in _compile_elsewhere(module) if fact.target == target}
    assert facts, f"{module} lists no case for {target}"
    return facts


@functools.cache
def _compile_elsewhere(module: str) -> tuple[Facts, ...]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    line = [sys.executable, "-m", "tests.ops.ahead_of_time", module]
    with open(Path(tempfile.gettempdir(), f"{module}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two workers would compile all twice
        done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return tuple(Facts(**fact) for fact in json.loads(done.stdout.splitlines()[-1]))


def _compile_case(case: dict[str, Any], target: str) -> Facts:
    """Compile one case; runs in the other process."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, name, given = case["kernel"], case["name"], case["signature"]
    if target == "gfx942":
        given = {
            a: kind.replace("fp8e4nv", "fp8e4b8").replace("fp8e5", "fp8e5b16") for a, kind in given.items()
        }
    signature = {a: given[a].removesuffix(":16") if a in given else "constexpr" for a in kernel.arg_names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, a in enumerate(kernel.arg_names)
        if given.get(a, "").endswith(":16")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=case["constexprs"], attrs=attrs)
    options = dict(case["options"])
    if "num_warps" in options:  # those of 32 threads
        options["num_warps"] = max(32 * options["num_warps"] // TARGETS[target][2], 1)
    try:
        built = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    except Exception as error:  # whatever the compiler raises is the result of the test
        return Facts(name, target, error=f"{type(error).__name__}: {error}")
    return _facts(name, target, built)


WIDE = r"\.global[\w.:]*\.(v4\.[bfsu]32|v2\.[bfsu]64|v8\.[bfsu]32|v4\.[bfsu]64)"
COUNTED = {  # backend: patterns of the instructions in its text that a field counts
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


def _facts(name: str, target: str, built: Any) -> Facts:
    backend, shared = TARGETS[target][0], built.metadata.shared
    text = built.asm["amdgcn" if backend == "hip" else "ptx"]
    of_amd = r"\.vgpr_spill_count:\s+(\d+)"
    spills = _largest(text, of_amd) if backend == "hip" else _stack_bytes(built.asm["cubin"])
    counts = {field: len(re.findall(pattern, text)) for field, pattern in COUNTED[backend].items()}
    return Facts(name, target, shared_bytes=shared, spills=spills, **counts)


def _largest(text: str, pattern: str) -> int:
    return max((int(value) for value in re.findall(pattern, text)), default=0)


def _stack_bytes(cubin: bytes) -> int:
    """Bytes of a thread's stack, as the tool that comes with Triton reads them."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = knobs.nvidia.cuobjdump.path
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return _largest(said.stdout, r"\bSTACK:(\d+)")


def main(module: str) -> None:
    """Compile all cases of a module for all targets and print the facts as one line of JSON."""
    cases = importlib.import_module(module).ahead_of_time_cases()
    facts = [_compile_case(c, t) for c in cases for t in TARGETS if t in c.get("only", TARGETS)]
    names = [(fact.case, fact.target) for fact in facts]
    assert len(set(names)) == len(names), f"{module}: cases of one name: {names}"
    print(json.dumps([asdict(fact) for fact in facts]))


if __name__ == "__main__":
    main(sys.argv[1])
