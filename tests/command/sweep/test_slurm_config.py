"""The launcher for Slurm composes over its plugin, and is not missed where the plugin is not installed."""

import re
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from graphmoe import conf
from graphmoe.config.schema import RunConfig
from tests.runs import command

SLURM = Path(conf.__path__[0], "hydra/launcher/slurm.yaml")


def launcher(*words: str) -> dict[str, Any]:
    """The launcher's configuration; Hydra's helpers need the plugins to be found first."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    Plugins.instance()
    ConfigStore.instance().store(name="schema", node=RunConfig)
    with initialize_config_module("graphmoe.conf", version_base="1.3"):
        composed = compose("config", list(words), return_hydra_config=True)
    found = OmegaConf.to_container(composed.hydra.launcher)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def test_our_launcher_is_the_plugins_with_one_process_for_each_node():
    ours, plugins = launcher("hydra/launcher=slurm"), launcher("hydra/launcher=submitit_slurm")
    assert ours.keys() == plugins.keys() and ours["_target_"] == plugins["_target_"]
    assert (ours["tasks_per_node"], ours["nodes"], ours["gpus_per_node"]) == (1, 1, 8)
    assert ours["signal_delay_s"] < ours["timeout_min"] * 60


def examples() -> dict[str, str]:
    """The files that the comments of slurm.yaml show, by their names."""
    lines = [line.removeprefix("#").removeprefix(" ") for line in SLURM.read_text().splitlines()]
    blocks = re.findall(r"my/hydra/launcher/(\w+)\.yaml:\n\n(.*?)\n\n", "\n".join(lines), re.DOTALL)
    return {name: "\n".join(line.removeprefix("  ") for line in block.split("\n")) for name, block in blocks}


@pytest.mark.parametrize("name", ["mi300x", "h200"])
def test_a_file_of_a_users_own_builds_on_it_as_the_comments_show(tmp_path, name):
    folder = tmp_path / "hydra/launcher"
    folder.mkdir(parents=True)
    (folder / f"{name}.yaml").write_text(examples()[name])
    found = launcher(f"hydra.searchpath=[file://{tmp_path}]", f"hydra/launcher={name}")
    assert (found["partition"], found["tasks_per_node"], found["name"]) == (name, 1, "graphmoe")
    assert found["setup"][0].startswith("export SRUN_CPUS_PER_TASK=") and found["cpus_per_task"] > 64


@pytest.mark.parametrize("words", [("--help",)])
def test_without_the_plugin_everything_else_works(tmp_path, words):
    shown = command(tmp_path, *words, module="tests.command.sweep.hidden_submitit")
    assert shown.wait() == 0 and shown.err.read_text() == ""
    assert shown.out.read_text()


def test_without_the_plugin_its_launcher_ends_with_an_error_and_starts_nothing(tmp_path):
    words = ("-m", "hydra/launcher=slurm", "train.steps=1")
    shown = command(tmp_path, *words, module="tests.command.sweep.hidden_submitit")
    assert shown.wait() == 2 and shown.err.read_text().startswith("error: ")
    assert "submitit_slurm" in shown.err.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stderr.txt", "stdout.txt"]
