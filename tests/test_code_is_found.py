"""Code of a user's own: where it is looked for, what is said of it, and whose names are trusted."""

import json
import os
from dataclasses import replace

import pytest
import torch
import yaml

from graphmoe.command.hydra import load_config
from graphmoe.config.choices import CODE_FOLDERS
from graphmoe.config.masking import to_plain
from graphmoe.config.schema import ConfigError, cache_root, compiled_folder
from graphmoe.pipeline_view import __main__ as pipeline_view
from graphmoe.plan.pipeline.schedules import make_table
from graphmoe.plan.pipeline.simulate import Costs, simulate
from graphmoe.plan.plan import plan_of
from graphmoe.plan.rules import check
from graphmoe.run.weights import model_from
from graphmoe.runtime.pipeline.recorder import FILE_NAME, write_timelines
from graphmoe.training.executor import chosen_experts
from graphmoe.worker import _path
from tests.runs import ROOT, TINY, command, config, metrics

QUIET = ("train.val_batches=0", "checkpoint.enabled=false", "train.log_interval=1")


def test_a_layer_that_a_file_names_is_imported_only_where_its_reader_names_it(own):
    own("strange_layer", "raise AssertionError\n")
    plain = {"layer": "strange_layer:it"}
    said = "x.layer=strange_layer:it is code outside .*: layer=strange_layer:it"
    with pytest.raises(ConfigError, match=said):
        model_from(plain, "x.", ("another:it",))
    assert model_from(plain, "x.", ("strange_layer:it",)).layer == "strange_layer:it"


def test_kernels_that_a_checkpoint_names_are_not_imported(own, tmp_path, caplog):
    own("strange_experts", "raise AssertionError\n")
    plan = plan_of(config(), 1)
    for name in ("strange_experts:mine", ",".join(["strange_experts:mine"] * 3)):
        assert chosen_experts(plan, torch.device("cpu"), None, name) == "torch,torch,torch"
    assert "name that as moe.experts on the command line" in caplog.text


KEYS = [
    "data.source", "optim.name", "optim.schedule", "moe.experts", "model.attention", "moe.dispatcher",
    "model.layer", "pipeline.schedule",
]  # fmt: skip


@pytest.mark.parametrize("key", [*KEYS, "passes.extra"])
def test_code_that_a_file_names_is_imported_only_where_its_reader_names_it(key, own, tmp_path):
    own("strange_code", "raise AssertionError\n")
    plain, (section, name) = to_plain(config()), key.split(".")
    plain[section][name] = ["strange_code:it"] if key == "passes.extra" else "strange_code:it"
    path = tmp_path / "resolved.yaml"
    path.write_text(yaml.safe_dump(plain))
    for named in ((), ("strange_code:other",)):
        with pytest.raises(ConfigError, match=f"{key}=strange_code:it; if you trust it, add after the file"):
            load_config(path, named=named)
    with pytest.raises(AssertionError):
        load_config(path, named=("strange_code:it",))


PROGRAMS = {
    "host.env": {"CXX": "./evil.sh", "NCCL_DEBUG": "***"},
    "compile.cache_dir": "/theirs",
    "compile.cache_shared": True,
    "data.cache_dir": "/theirs",
    "log.mlflow": True,
    "checkpoint.mirror": "s3://theirs/runs",
}


def test_a_file_chooses_programs_and_trackers_only_where_its_reader_names_the_key(tmp_path, caplog):
    plain, own = to_plain(config()), {}
    for key, value in PROGRAMS.items():
        section, name = key.split(".")
        own[key], plain[section][name] = plain[section][name], value
    own |= {"compile.cache_dir": str(compiled_folder()), "data.cache_dir": str(cache_root())}
    own["host.env"] = {"NCCL_DEBUG": "***"}  # which sets nothing, and a run warns of it
    path = tmp_path / "resolved.yaml"
    path.write_text(yaml.safe_dump(plain))

    def found(*named):
        read = to_plain(load_config(path, named=named))
        return {key: read[key.split(".")[0]][key.split(".")[1]] for key in PROGRAMS}

    keys = ["host.env.CXX", *(key for key in PROGRAMS if key != "host.env")]
    assert found() == own and f"path: {' '.join(keys)}" in caplog.text
    assert found(*keys) == PROGRAMS | {"host.env": {"CXX": "***", "NCCL_DEBUG": "***"}}  # written masked
    with pytest.raises(ConfigError, match="expected one path"):
        _path([str(path), "train.steps"])
    assert found("log.mlflow") == own | {"log.mlflow": True}


def test_code_that_a_yaml_file_names_is_imported_only_where_the_command_line_names_it(own, tmp_path):
    own("strange_code", "raise AssertionError\n")
    for folder, text in (
        ("model", "defaults: [tiny, _self_]\nlayer: strange_code:it\n"),
        ("host", "# @package _global_\npasses: {extra: ['strange_code:it']}\n"),
    ):
        (tmp_path / "conf" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / folder / "theirs.yaml").write_text(text)
        said = {
            "model": "type model.layer=strange_code:it too",
            "host": "type passes.extra=[strange_code:it] too",
        }
        words = ("--config-dir", "conf", f"{folder}=theirs")
        refused = command(tmp_path, *words)
        assert refused.wait() == 2 and said[folder] in refused.err.read_text(), refused.err.read_text()
        assert "AssertionError" not in refused.err.read_text()
        named = command(tmp_path, *words, said[folder].split()[1])
        assert named.wait() != 0 and "AssertionError" in named.err.read_text()


def test_a_malformed_path_of_the_command_line_is_no_strange_code(tmp_path):
    refused = command(tmp_path, "passes.extra=[my_pass.py]")
    assert refused.wait() == 2 and "a YAML file" not in refused.err.read_text()
    assert "my_pass.py" in refused.err.read_text()


def test_a_folder_of_weights_configures_nothing_but_its_model(tmp_path):
    (tmp_path / "lite").mkdir()
    (tmp_path / "lite" / "weights.json").write_text("{}")
    refused = command(tmp_path, "--config-dir", "lite", "model=lite")
    assert refused.wait() == 2 and "use model=lite" in refused.err.read_text()


def test_a_schedule_that_a_recorded_run_names_is_not_imported(own, tmp_path, capsys):
    own("strange_code", "raise AssertionError\n")
    costs = Costs((1,) * 2, (1,) * 2, (1,) * 2)
    timeline = simulate(replace(make_table("1f1b", 2, 3), schedule="strange_code:it"), costs)
    write_timelines(tmp_path / FILE_NAME, {1: timeline})
    pipeline_view.main([f"run={tmp_path}"])
    assert "strange_code:it, step 1 as recorded" in capsys.readouterr().out


def test_a_file_written_for_a_torchrun_runs_by_the_command_that_is_printed(own, tmp_path):
    own("own_schedules", "def linear(progress):\n    return 1 - progress\n")
    words = (*TINY, *QUIET, "train.steps=2", "optim.schedule=own_schedules:linear", "hydra.run.dir=run")
    written = command(tmp_path, *words, "launch.write_only=true", "format=json")
    assert written.wait() == 0, written.err.read_text()
    *_, path, name = json.loads(written.out.read_text())["command"]
    refused = command(tmp_path, path, module="graphmoe.worker")
    assert refused.wait() == 2 and "after the file's path: own_schedules:linear" in refused.err.read_text()
    there = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    run = command(tmp_path, path, name, module="graphmoe.worker", environment=there)
    assert run.wait() == 0, run.err.read_text()
    assert [row["step"] for row in metrics(tmp_path / "run") if "lr" in row] == [1, 2]


@pytest.mark.parametrize("key", KEYS)
def test_a_name_that_no_table_has_and_code_that_cannot_be_imported_are_named(key, tmp_path, monkeypatch):
    monkeypatch.setenv(CODE_FOLDERS, f"{tmp_path}/mine")
    for name, said in {
        "nothing": ": there is no such choice; .*module:NAME",
        "no.such_name": ": there is no .* no:such_name for code of your",
        "no_such_module:this": f" cannot be imported: .*, {tmp_path}/mine",
    }.items():
        with pytest.raises(ConfigError, match=rf"{key}={name}{said}"):
            check(config(f"{key}={name}"))


@pytest.mark.parametrize("key", ["optim.schedule", "data.source"])
def test_code_that_is_no_function_is_refused_before_a_run_begins(key):
    with pytest.raises(ConfigError, match=f"{key}=math:pi is a float; name a function"):
        check(config(f"{key}=math:pi"))


def test_an_import_that_fails_inside_of_own_code_is_named(own):
    own("own_needs", "import no_such_package\n")
    own("own_typo", "def linear(progress:\n")
    said = "No module named 'no_such_package'.; install", "line 1"
    for module, cause in zip(("own_needs", "own_typo"), said, strict=True):
        with pytest.raises(ConfigError, match=f"optim.schedule={module}:linear cannot be imported .*{cause}"):
            check(config(f"optim.schedule={module}:linear"))


def test_ranks_find_code_and_a_model_in_a_config_dir(tmp_path):
    there = tmp_path / "mine"
    (there / "model").mkdir(parents=True)
    (there / "config_dir_schedules.py").write_text("def linear(progress):\n    return 1 - progress\n")
    (there / "model" / "narrow.yaml").write_text("name: narrow\nhidden_size: 32\ncontext_length: 16\n")
    kept = [word for word in TINY if not word.startswith("model.hidden_size")]
    words = ["--config-dir", "mine", "model=narrow", *kept, *QUIET, "launch.nproc=2", "train.steps=2"]
    words += ["hydra.run.dir=run", "optim.schedule=config_dir_schedules:linear", "optim.min_lr_ratio=0"]
    run = command(tmp_path, *words)
    assert run.wait() == 0, run.err.read_text()
    rates = [row["lr"] for row in metrics(tmp_path / "run") if "lr" in row]
    assert rates == pytest.approx([1e-2 * (1 - step / 2) for step in (1, 2)], abs=1e-8)
    written = command(tmp_path, *words, "launch.write_only=true", "format=json")
    assert written.wait() == 0 and f"PYTHONPATH={there}" in json.loads(written.out.read_text())["command"]
