"""Modules may move: hang reports, restarts, sweeps and cache keys depend on no name of a file."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from graphmoe.runtime.cache.key import source_hashes
from tests.faults import HANG_AT, RAISE_AT, STEP_S
from tests.faults import WORDS as FAULTY
from tests.runs import ROOT, TINY

pytestmark = pytest.mark.slow

MOVES = {
    "graphmoe.runtime.ranks": "graphmoe.runtime.launch.world",
    "graphmoe.training.validation": "graphmoe.held.out",
    "graphmoe.optim.reduction": "graphmoe.sums.reduction",
    "graphmoe.training.step_rows": "graphmoe.rows",
    "graphmoe.command.sweep.job": "graphmoe.command.job",
    "graphmoe.ops.collectives": "graphmoe.ops.axes",
    "graphmoe.runtime.launch.stamps": "graphmoe.runtime.watch.signs",
    "graphmoe.runtime.launch.hangs": "graphmoe.runtime.watch.hangs",
}
TRAIN = ("-m", "graphmoe.train", *TINY, *FAULTY)
TWO = ("launch.nproc=2", "train.steps=6", "checkpoint.interval=2", "hydra.run.dir=run")


@pytest.fixture(scope="module")
def moved(tmp_path_factory) -> Path:
    """A copy of the packages in which modules lie elsewhere, and their importers know it."""
    root: Path = tmp_path_factory.mktemp("moved")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "graphmoe", root / "graphmoe", ignore=ignored)  # with what its links point to
    (root / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "faults.py", root / "tests")
    for before, after in MOVES.items():
        there = root / f"{after.replace('.', '/')}.py"
        there.parent.mkdir(exist_ok=True)
        (root / f"{before.replace('.', '/')}.py").rename(there)
    for file in root.rglob("*.py"):
        file.write_text(re.sub(r"^ *(from|import) .*", _renamed, file.read_text(), flags=re.MULTILINE))
    return root


def _renamed(line: re.Match[str]) -> str:
    """An import of the new name; strings keep the old one."""
    text = line[0]
    for before, after in MOVES.items():
        package, _, name = before.rpartition(".")
        new_package, _, new_name = after.rpartition(".")
        text = re.sub(rf"\b{re.escape(before)}\b", after, text)
        text = re.sub(
            rf"from {re.escape(package)} import {name}$",
            f"from {new_package} import {new_name} as {name}",
            text,
        )
    return text


@pytest.fixture
def begin(moved, tmp_path) -> Callable[..., subprocess.Popen[str]]:
    """Start a command of the copy in an empty folder."""

    def begin(*words: str, **environment: str) -> subprocess.Popen[str]:
        variables = {**os.environ, "PYTHONPATH": str(moved), "OMP_NUM_THREADS": "1", **environment}
        command, pipe = [sys.executable, *words], subprocess.PIPE
        return subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=pipe, stderr=pipe, text=True)

    return begin


def test_a_hang_is_named_where_it_is_and_the_others_wait(begin, moved):
    words = (*TRAIN, *TWO, "launch.hang_timeout_s=4")
    _, said = begin(*words, **{HANG_AT: "1:0:4"}).communicate(timeout=120)
    first, second, *_ = said.partition("error: ")[2].splitlines()
    assert re.search(rf"it is at {moved}/tests/faults.py:\d+ \(_step\)$", first), first
    assert re.search(r"rank 0 is in step 4: it waits for other ranks or the device at ", second), second


def test_workers_start_again_after_an_error(begin, tmp_path):
    run = begin(*TRAIN, *TWO, "launch.max_restarts=1", **{RAISE_AT: "0:0:3"})
    _, said = run.communicate(timeout=120)
    assert run.returncode == 0 and "all workers start again (1 of 1)" in said, said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 6


def test_workers_stop_at_a_signal(begin, tmp_path):
    run = begin(*TRAIN, *TWO, "train.steps=1000", **{STEP_S: "0.2"})
    while not (tmp_path / "run" / "checkpoints").exists() and run.poll() is None:
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=60)
    assert "SIGTERM received: the workers stop after this step" in said, said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_by"] == "SIGTERM"


def test_a_sweep_has_its_page(begin, tmp_path):
    run = begin(*TRAIN[:2], "-m", *TRAIN[2:], "train.steps=2", "hydra.sweep.dir=sweep")
    _, said = run.communicate(timeout=120)
    assert run.returncode == 0 and (tmp_path / "sweep" / "sweep.html").is_file(), said


def test_the_cache_key_holds_each_source_wherever_it_lies(begin):
    code = "import json; from graphmoe.runtime.cache import key; print(json.dumps(key.source_hashes()))"
    there, here = json.loads(begin("-c", code).communicate()[0]), source_hashes()
    changed = {folder for folder in {*here, *there} if here.get(folder) != there.get(folder)}
    assert {str(Path(name.replace(".", "/")).parent) for name in (*MOVES, *MOVES.values())} <= changed
