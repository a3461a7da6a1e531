"""Sweeps by submitit: on this machine and on a Slurm that a test plays, and where it is missing."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from graphmoe import conf
from tests import faults
from tests.command.sweep.slurm_cluster import install
from tests.runs import ROOT, TINY, Command, command, hydra_config

WORDS = ("-m", *(word for word in TINY if not word.startswith("optim.lr=")), "log.progress=false")


@pytest.fixture
def plugin() -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")


def summaries(folder: Path) -> list[dict[str, Any]]:
    (sweep,) = (folder / "multirun/mini").iterdir()
    return [json.loads(path.read_text()) for path in sorted(sweep.glob("*/summary.json"))]


@pytest.mark.slow
def test_local_jobs_of_submitit_are_runs_like_any_other(plugin, tmp_path):
    words = (*WORDS, "hydra/launcher=submitit_local", "optim.lr=1e-2,2e-2", "train.steps=2")
    sweep = command(tmp_path, *words, seconds=180)
    assert sweep.wait() == 0, sweep.err.read_text()
    first, second = summaries(tmp_path)
    assert first["finished"] and second["finished"] and first["steps"] == second["steps"] == 2
    assert first["final_loss"] != second["final_loss"]
    assert sweep.out.read_text().count("finished") == 2


def on_slurm(folder: Path, *words: str, **environment: str) -> Command:
    install(folder / "bin")
    environment["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"
    return Command(folder, (*WORDS, "hydra/launcher=slurm", *words), environment=environment)


@pytest.mark.slow
def test_two_nodes_of_a_slurm_job_train_together_as_one_worker_would(plugin, tmp_path):
    pair, alone = tmp_path / "pair", tmp_path / "alone"
    pair.mkdir()
    alone.mkdir()
    sweep = on_slurm(pair, "hydra.launcher.nodes=2", "optim.lr=1e-2")
    assert sweep.wait(180) == 0, sweep.err.read_text()
    (summary,) = summaries(pair)
    folder = Path(summary["folder"])
    assert {path.name for path in (folder / "logs").glob("rank*.log")} == {"rank0.log", "rank1.log"}
    assert command(alone, *WORDS[1:], "optim.lr=1e-2").wait() == 0
    by_one = json.loads((alone / "outputs/mini/summary.json").read_text())
    for name in ("final_loss", "final_val_loss"):
        assert summary[name] == pytest.approx(by_one[name], rel=1e-5)


@pytest.mark.slow
def test_a_job_whose_time_is_up_saves_and_goes_on_when_it_has_another_turn(plugin, tmp_path):
    words = ("optim.lr=1e-2", "train.steps=20", "train.log_interval=1", "checkpoint.interval=100")
    sweep = on_slurm(tmp_path, *words, *faults.WORDS, **{faults.STEP_S: "0.3"})
    job = "multirun/mini/*/0"
    sweep.wait_until(lambda: any(path.stat().st_size for path in tmp_path.glob(f"{job}/metrics.jsonl")))
    for process in psutil.process_iter(["cmdline"]):
        of_task = process.info["cmdline"] or []
        if "submitit.core._submit" in of_task and str(tmp_path) in of_task[-1] and "--output" not in of_task:
            process.send_signal(signal.SIGUSR2)
    assert sweep.wait(180) == 0, sweep.err.read_text()
    (summary,) = summaries(tmp_path)
    assert summary["finished"] and summary["steps"] == 20
    (log,) = tmp_path.glob(f"{job}/logs/rank0.log")
    assert "stopped after step" in log.read_text() and "continuing after step" in log.read_text()
    (output,) = tmp_path.glob("multirun/mini/*/.submitit/*/*_0_log.out")
    assert "Requeued job" in output.read_text()


SLURM = Path(conf.__path__[0], "hydra/launcher/slurm.yaml")


def launcher(*words: str) -> dict[str, Any]:
    Plugins.instance()
    return OmegaConf.to_container(hydra_config(*words).hydra.launcher)


def test_our_launcher_is_the_plugins_with_one_process_for_each_node(plugin):
    ours, plugins = launcher("hydra/launcher=slurm"), launcher("hydra/launcher=submitit_slurm")
    assert ours.keys() == plugins.keys() and ours["_target_"] == plugins["_target_"]
    assert (ours["tasks_per_node"], ours["nodes"], ours["gpus_per_node"]) == (1, 1, 8)
    assert ours["signal_delay_s"] < ours["timeout_min"] * 60


@pytest.mark.parametrize("name", ["mi300x", "h200"])
def test_a_file_of_a_users_own_builds_on_it_as_the_comments_show(plugin, tmp_path, name):
    folder = tmp_path / "hydra/launcher"
    folder.mkdir(parents=True)
    lines = [line.removeprefix("#").removeprefix(" ") for line in SLURM.read_text().splitlines()]
    shown = rf"my/hydra/launcher/{name}\.yaml:\n\n(.*?)\n\n"
    (block,) = re.findall(shown, "\n".join(lines), re.DOTALL)
    (folder / f"{name}.yaml").write_text(textwrap.dedent(block))
    found = launcher(f"hydra.searchpath=[file://{tmp_path}]", f"hydra/launcher={name}")
    assert (found["partition"], found["tasks_per_node"], found["name"]) == (name, 1, "graphmoe")
    assert found["setup"][0].startswith("export SRUN_CPUS_PER_TASK=") and found["cpus_per_task"] > 64


HIDDEN = """
import pkgutil
walk = pkgutil.walk_packages  # by which Hydra finds its plugins
pkgutil.walk_packages = lambda *a, **b: (found for found in walk(*a, **b) if "submitit" not in found.name)
from graphmoe.train import main
main()
"""


@pytest.mark.parametrize(("words", "status"), [("--help", 0), ("-m hydra/launcher=slurm train.steps=1", 2)])
def test_without_the_plugin_its_launcher_alone_is_an_error_and_starts_nothing(tmp_path, words, status):
    line, found = [sys.executable, "-c", HIDDEN, *words.split()], os.environ | {"PYTHONPATH": str(ROOT)}
    shown = subprocess.run(line, cwd=tmp_path, env=found, capture_output=True, text=True)
    assert shown.returncode == status
    assert (shown.stdout == "") == (shown.stderr != "") == (status == 2)
    assert status == 0 or (shown.stderr.startswith("error: ") and "submitit_slurm" in shown.stderr)
    assert not [*tmp_path.iterdir()]
