"""The commands of each example's README run, and do what it says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, metrics

FOLDERS = sorted(path.parent.name for path in ROOT.glob("examples/*/README.md"))
PIPED = {"capture_output": True, "text": True}
pytestmark = pytest.mark.slow


def commands_of(name):
    text = (ROOT / "examples" / name / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def run_example(name, folder):
    for path in ("examples", "docs"):
        (folder / path).symlink_to(ROOT / path)
    paths = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": paths, "COLUMNS": "200"}
    printed = ""
    for line in commands_of(name):
        done = subprocess.run(["bash", "-c", line], cwd=folder, env=environment, timeout=600, **PIPED)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        printed += done.stdout
    return printed


def test_own_text_goes_to_transformers_and_learns_on(tmp_path):
    assert "logits differ by" in run_example("hugging_face", tmp_path)
    rows = [metrics(tmp_path / "outputs" / run) for run in ("own_text", "continued")]
    first, second = ([row["val_loss"] for row in of_run if "val_loss" in row] for of_run in rows)
    assert second[0] == pytest.approx(first[-1], abs=0.02) and second[-1] < second[0] < first[0]


def test_a_sweep_has_the_winner_that_its_table_has(tmp_path):
    printed = run_example("sweep", tmp_path)
    jobs = json.loads((tmp_path / "outputs/sweep/sweep.json").read_text())["jobs"]
    best = min(jobs, key=lambda job: job["value"])
    assert len(jobs) == 3 and f"job {best['job']}, validation loss {best['value']:.4f}: " in printed


def test_a_search_names_a_layout_that_a_dry_run_builds(tmp_path):
    printed = run_example("layout_search", tmp_path)
    assert "parallel.pp=2 parallel.ep=8" in printed.split("Recommended")[1]
    report = json.loads(next(tmp_path.glob("outputs/**/dry_run.json")).read_text())
    assert report["world"] == 16


def test_code_of_ones_own_trains(tmp_path):
    run_example("own_code", tmp_path)
    folder = tmp_path / "outputs" / "narrow"
    rates = [row["lr"] for row in metrics(folder) if "lr" in row]
    steps = [one - other for one, other in zip(rates[-9:-1], rates[-8:], strict=True)]
    assert len(rates) == 20 and steps == pytest.approx([steps[0]] * 8, rel=1e-3) and steps[0] > 0
    units = json.loads((folder / "compile_report.json").read_text())
    assert "square_as_product" in json.dumps(units)


def test_each_example_is_run_here():
    text = Path(__file__).read_text(encoding="utf-8")
    assert sorted(re.findall(r'run_example\("(\w+)"', text)) == FOLDERS


def test_loops_of_ones_own_learn(tmp_path):
    printed = run_example("own_loop", tmp_path)
    losses = [float(found) for found in re.findall(r"loss (\d\.\d+)", printed)]
    assert losses[0] == losses[2] == 0.6931 and max(losses[1], losses[3]) < 0.1
    first, last = (float(found) for found in re.findall(r"mean reward (\d\.\d+)", printed))
    assert last > first + 0.1 and (tmp_path / "exported/dpo/model.safetensors").exists()
