"""What a process imports before it trains: seconds in which nothing happens."""

from __future__ import annotations

import subprocess
import sys

COMPILERS = {
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch._inductor.runtime.triton_heuristics",
}


def imported_by(code: str) -> set[str]:
    """Names of the modules of a new process that has run some code."""
    script = f"import sys\n{code}\nprint(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return set(ran.stdout.split())


def test_a_trainer_imports_no_compiler_until_it_compiles():
    assert not imported_by("import graphmoe.trainer, graphmoe.dry_run") & COMPILERS
    assert imported_by("from graphmoe import torch_compat; torch_compat.import_compilers()") >= COMPILERS
