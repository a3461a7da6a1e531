"""Triton kernels on a machine without a GPU: in Triton's interpreter, and as machine code of four GPUs."""

import importlib
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.distributed.ranks import selected
from tests.ops.ahead_of_time import ON_NVIDIA_ONLY, ROOT, TARGETS, compiled
from tests.runs import slow_but

TEXTS = {path.stem: path.read_text() for path in Path(__file__).parent.glob("test_*.py")}
INTERPRETED = sorted(
    name for name, text in TEXTS.items() if re.search(r"^from tests.ops.interpreted", text, re.M)
)
AHEAD_OF_TIME = sorted(name for name, text in TEXTS.items() if "\ndef ahead_of_time_cases" in text)
QUICK = "test_swiglu"
TRITON = tuple(map(int, version("triton").split(".")[:2]))
SHARED_BYTES = {"gfx942": 60 << 10, "gfx950": 160 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
"""Shared memory (LDS) that one program may use: 4 KiB of gfx942's are left to other versions of Triton."""
SPILLS = {("test_grouped_mlp", target): 16 for target in ("sm_90", "sm_100")}
SPILLS |= {("test_masked_attention", "sm_90"): 32, ("test_masked_attention", "sm_100"): 640}
SPILLS |= {("test_delta_net", target): 8 for target in ("sm_90", "sm_100")}
"""Bytes of stack of tiles that fill the registers and were the fastest; attention's on sm_90, not sm_100."""
WIDE = {  # loads and stores of 16 bytes, and each row once: 64 slots in rounds of 16
    "test_swiglu": {
        **{"_forward_kernel": (2, 1), "_backward_kernel": (3, 2)},
        **{"_forward_kernel biased": (6, 1), "_backward_kernel biased": (7, 2)},
    },
    "test_permute": {
        **{f"_spread_kernel {case}": (1, slots) for case, slots in (("6", 6), ("16 weighted", 16))},
        **{f"_sum_kernel {case}": (slots, 1) for case, slots in (("6", 6), ("16 weighted", 16))},
        "_spread_kernel 64 weighted": (1, 16),
        "_sum_kernel 64 weighted": (16, 1),
    },
    # 64 bytes of each thread that pulls or puts; packing one vector, beside four of counts and ends (two
    # where rows are words, otherwise none with triton 3.9), which is stored in up to six blocks, where it is
    # received, and as a token; summing one of each place. A thread that adds what comes home has two of the
    # total and of what comes.
    "test_symm": {
        "pull_kernel": (4, 4),
        "put_kernel": (4, 4),
        "pack_kernel": (5 if TRITON < (3, 9) else 1, 8),
        "pull_kernel of words": (4, 4),
        "pack_kernel of words": (3, 8),
        "sum_parts_kernel": (2 * 8, 2),
        "sum_kernel 6": (6, 1),
        "sum_kernel 16": (16, 1),
    },
    "test_replica_traffic": {
        **{f"{name}_kernel": (4, 4) for name in ("put", "pull")},
        "home_kernel": (4, 2),
        "home_kernel of bf16": (3, 1),
        "home_kernel from bf16": (3, 2),
        "home_kernel from and of bf16": (2, 1),
    },
}
LOADS = {"test_router": ("_forward_kernel 64 experts",), "test_permute": ("_dot_kernel 6",)}
"""Kernels that load 16 bytes at a time."""
STORES = {
    "test_router": ("_backward_kernel 64 experts",),
    "test_linear_cross_entropy": ("_rows_kernel bf16", "_rows_kernel fp32"),
}

PRODUCTS = {
    "test_fp8_mlp": ("rows_kernel", "weight_grad_kernel"),
    "test_mx_mlp": ("rows_kernel", "weight_grad_kernel"),
    "test_fp8_blocks": ("mx_product_kernel",),
    "test_delta_net": ("chunks_kernel", "states_kernel", "d_states_kernel", "gradients_kernel"),
    "test_masked_attention": ("forward_kernel", "dq_kernel", "dkv_kernel"),
}
"""Kernels that run on matrix instructions."""
SCALED = {("test_mx_mlp", "sm_100"): 19, ("test_mx_mlp", "gfx950"): 16}
SCALED |= {("test_fp8_blocks", target): 4 for target in ("sm_100", "gfx950")}
"""Numbers of products in mxfp8, on instructions that take scales of blocks of 32."""


@pytest.fixture(scope="module")
def in_interpreter(request, tmp_path_factory) -> tuple[list[ElementTree.Element], str]:
    """Results of all wanted files with the backend ``interpreted``, in one process of their own."""
    report = tmp_path_factory.mktemp("interpreter") / "report.xml"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    flags = ["-p", "no:xdist", "-p", "no:cacheprovider", "-k", "interpreted", "-m", "not gpu or slow"]
    files = [f"tests/ops/{file}.py" for file in selected(request, "interpreted")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, f"--junitxml={report}", *files],
        cwd=ROOT,
        env=environment | {"TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode in (0, 1), done.stdout[-8000:]
    return [*ElementTree.parse(report).iter("testcase")], done.stdout[-8000:]


@pytest.mark.parametrize("interpreted", slow_but(INTERPRETED, QUICK))
def test_kernels_pass_in_the_interpreter(in_interpreter, interpreted):
    cases, said = in_interpreter
    of_file = [case for case in cases if case.get("classname") == f"tests.ops.{interpreted}"]
    assert of_file and not any(len(case) for case in of_file), said  # a skipped test has launched nothing


@pytest.mark.slow
def test_every_kernel_is_compiled_for_gfx950_or_replaced_there():
    modules = [importlib.import_module(f"tests.ops.{file}") for file in AHEAD_OF_TIME]
    cases = [case for module in modules for case in module.ahead_of_time_cases()]
    kernels = {case["kernel"] for case in cases if "gfx950" in case.get("only", TARGETS)}
    for file in (ROOT / "graphmoe/ops").rglob("*.py"):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        names = re.findall(r"^@triton.jit.*\ndef (\w*_kernel)\(", file.read_text(), re.M)
        missing = {*names} - {kernel.__name__ for kernel in kernels if kernel.__module__ == module}
        assert not missing or module == "graphmoe.ops.symmetric_mm_kernel", (module, missing)


@pytest.mark.parametrize("file", slow_but(AHEAD_OF_TIME, QUICK))
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_without_spills_and_atomics_fit_into_shared_memory_and_move_wide_rows(file, target):
    facts = compiled(f"tests.ops.{file}", target)
    assert facts or f"tests.ops.{file}" in ON_NVIDIA_ONLY
    errors = {name: fact.error for name, fact in facts.items() if fact.error}
    assert not errors, "\n\n".join(f"{name}: {error}" for name, error in errors.items())
    spills, atomics = SPILLS.get((file, target), 0), file == "test_waits"  # one, of an integer
    most = atomics, spills, (shared := SHARED_BYTES[target])
    found = {name: (fact.atomics, fact.spills, fact.shared_bytes) for name, fact in facts.items()}
    wrong = {name for name, each in found.items() if any(x > y for x, y in zip(each, most, strict=True))}
    assert not wrong, f"spills, atomics or more than {shared} bytes of shared memory: {wrong}"
    wide = WIDE.get(file, {})
    assert wide == {name: (facts[name].wide_loads, facts[name].wide_stores) for name in wide}
    assert all(facts[name].wide_loads for name in LOADS.get(file, ()))
    assert all(facts[name].wide_stores for name in STORES.get(file, ()))
    products = [fact for name, fact in facts.items() if name.startswith(PRODUCTS.get(file, ()))]
    assert all(fact.matrix_ops > 0 for fact in products)
    if (file, target) in SCALED:
        assert len(products) == SCALED[file, target]
        assert all(fact.scaled_ops == fact.matrix_ops for fact in products)
    for name, fact in facts.items() if file == "test_grouped_mlp" else ():
        if "bf16" in name:
            # NVIDIA loads by asynchronous copies, and AMD may store straight from the matrix registers.
            wide_moves = fact.wide_loads if target.startswith("gfx") else fact.wide_stores
            assert fact.matrix_ops > 0 and wide_moves > 0, name
        assert " small " not in name or fact.shared_bytes <= 99 << 10, "more than consumer cards have"
