"""Tab completion of ``python -m graphmoe.train`` in a real bash."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys

import pytest

from graphmoe.config import completion
from tests.runs import ROOT

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def bash(script: str) -> list[str]:
    """The lines that a script prints after it has loaded the completion."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    whole = f"{completion.BASH}\n{script}"
    run = subprocess.run(["bash", "-c", whole], env=environment, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def completed(line: str) -> list[str]:
    """What bash offers for the last word of a line."""
    words = shlex.join([*line.split(), *([""] if line.endswith(" ") else [])])
    state = f"COMP_LINE={shlex.quote(line)} COMP_WORDS=({words}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))"
    return bash(
        f'{state}; COMP_POINT=${{#COMP_LINE}}; _graphmoe_complete; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )


@needs_bash
@pytest.mark.slow
def test_the_install_command_prints_the_function_and_only_that(tmp_path):
    line = [sys.executable, "-m", "graphmoe.train", "-sc", "install=bash"]
    run = subprocess.run(line, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, completion.BASH, "")
    assert list(tmp_path.iterdir()) == []


@needs_bash
@pytest.mark.slow
@pytest.mark.parametrize(
    "typed, offered",
    [
        ("model=tin", {"model=tiny", "model=tiny_gqa"}),
        ("optim.min", {"optim.min_lr_ratio="}),
        ("train.steps=3 debug=", {"debug=quick", "debug=deterministic"}),
    ],
)
def test_options_and_keys_are_completed(typed, offered):
    assert set(completed(f"{sys.executable} -m graphmoe.train {typed}")) == offered


@needs_bash
def test_other_commands_of_python_complete_files_as_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    assert completed("python scr") == ["script.py"]
    assert completed("python -m other.module scr") == ["script.py"]


@needs_bash
def test_the_function_is_bound_to_python():
    assert all("_graphmoe_complete" in line for line in bash("complete -p python python3"))


def test_the_shell_line_is_cut_to_what_hydra_expects(monkeypatch):
    monkeypatch.setenv("COMP_LINE", "python -m graphmoe.train model=t")
    completion.adapt_query()
    assert os.environ["COMP_LINE"] == "graphmoe.train model=t"
    completion.adapt_query()
    assert os.environ["COMP_LINE"] == "graphmoe.train model=t"


@pytest.mark.parametrize(
    "argv, asked",
    [
        (["/x/train.py", "-sc", "install=bash"], True),
        (["/x/train.py", "--shell-completion", "install=bash"], True),
        (["/x/bin/graphmoe-train", "-sc", "install=bash"], False),  # Hydra completes a command itself
        (["/x/train.py", "-sc", "query=bash"], False),
        (["/x/train.py"], False),
    ],
)
def test_only_the_install_command_of_a_module_is_ours(argv, asked):
    assert completion.is_install(argv) is asked
