"""Runs Triton kernels on a CPU: a file of tests in a process of its own, with TRITON_INTERPRET=1.

Triton decides where it is imported whether its functions are interpreted, for the whole process; other tests
in the same worker need them compiled. So kernel tests live in files that pytest does not collect by itself,
``tests/ops/interpreted_*.py``, and a collected file shows each of their test functions as one test::

    FILE = "tests/ops/interpreted_scale.py"

    @pytest.mark.parametrize("name", names_of(FILE))
    def test_in_the_interpreter(name):
        assert_passed(FILE, name)

The other file holds ordinary tests (parametrised ones too) that launch kernels on CPU tensors, and may
import kernel modules as it likes: the process of the collected file reads it, but does not import it. It runs
once in each process that asks for it, so only one collected file should. By hand:
``TRITON_INTERPRET=1 python -m pytest tests/ops/interpreted_scale.py``.

The interpreter's limits (Triton 3.6): with numpy 2.4 or later, loops over kernel arguments fail; a bf16
``tl.dot`` returns garbage (cast its operands to fp32 there, by a constexpr); a cast of fp32 to bf16 cuts off
the low bits, which devices round; and it is slow, about 0.1 ms for each operation of each program.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]


def names_of(file: str) -> list[str]:
    """Names of the test functions of a file, which is read but not imported."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    names = [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    assert names, f"{file} has no test function"
    return names


def assert_passed(file: str, name: str) -> None:
    """Check that every case of one test function passed in the interpreter, and that there was one."""
    outcomes, output = _run(file)
    cases = {case: failure for case, failure in outcomes.items() if case.split("[")[0] == name}
    assert cases, f"{file} did not run {name}:\n{output}"
    failures = {case: failure for case, failure in cases.items() if failure}
    assert not failures, "\n\n".join(f"{case}\n{failure}" for case, failure in failures.items())


@functools.cache
def _run(file: str) -> tuple[dict[str, str], str]:
    """Why each case of a file failed ('' where it passed), and the end of what pytest printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["TRITON_INTERPRET"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, f"--junitxml={report}", file],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert report.exists(), done.stdout[-4000:]
        cases = list(ElementTree.parse(report).iter("testcase"))
    return {case.attrib["name"]: _failure(case) for case in cases}, done.stdout[-4000:]


def _failure(case: ElementTree.Element) -> str:
    # A skipped test has launched nothing: it counts as failed.
    found = [child for child in case if child.tag in ("failure", "error", "skipped")]
    return "\n".join(child.text or child.attrib.get("message", child.tag) for child in found)
