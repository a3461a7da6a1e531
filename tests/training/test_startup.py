"""Imports of a process before it trains: seconds in which nothing happens."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

COMPILERS = {
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch._inductor.runtime.triton_heuristics",
}


def imported_by(code: str) -> set[str]:
    """Names of the modules of a new process that has run some code."""
    script = f"import sys\n{code}\nprint(*sys.modules)"
    line = [sys.executable, "-c", script]
    ran = subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True)
    return set(ran.stdout.split())


def test_a_trainer_imports_no_compiler_until_it_compiles():
    assert not imported_by("import graphmoe.training.trainer, graphmoe.training.dry_run") & COMPILERS
    assert (
        imported_by("from graphmoe.runtime import torch_compat; torch_compat.import_compilers()") >= COMPILERS
    )


def test_a_model_is_built_without_the_compiler():
    imports = "from graphmoe.config.schema import ModelConfig; from graphmoe.model.build import build_model"
    code = f"{imports}; build_model(ModelConfig())"
    assert "torch._dynamo" not in imported_by(code)
