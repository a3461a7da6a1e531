"""A worker by hand, signals in one process, and the words for what goes wrong."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml

from graphmoe.command.hydra import load_config
from graphmoe.config.masking import to_plain
from graphmoe.config.schema import ConfigError
from graphmoe.runtime.host.signals import LAUNCHER_PID
from graphmoe.runtime.launch.failures import RunFailed
from graphmoe.worker import _adapted, join
from tests.runs import ROOT, TINY, Command, command, config, numbers

SHORT = ("train.steps=4", "hydra.run.dir=run")


def test_a_replay_goes_on_or_gets_a_folder_of_its_own(tmp_path):
    finished = tmp_path / "finished"
    assert command(tmp_path, *TINY, *SHORT).wait() == 0
    (tmp_path / "run").rename(finished)
    (tmp_path / "run").mkdir()
    shutil.copy(finished / "resolved.yaml", tmp_path / "run")
    for folder in ("run", "run-2"):  # the first replay ends the run
        replay = command(tmp_path, "run/resolved.yaml", module="graphmoe.worker")
        assert replay.wait() == 0, replay.err.read_text()
        assert replay.out.read_text().endswith(f"results: {folder}\n")
        assert numbers(tmp_path / folder) == numbers(finished)


def test_a_folder_that_was_only_written_is_run_by_the_same_command(tmp_path):
    written = command(tmp_path, *TINY, *SHORT, "launch.write_only=true", "format=json")
    document = json.loads(written.out.read_text())
    assert document["folder"] == str(tmp_path / "run")
    assert document["command"][-3:] == ["-m", "graphmoe.worker", "run/resolved.yaml"]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    run = command(tmp_path, *TINY, *SHORT)
    assert run.wait() == 0 and run.out.read_text().endswith("results: run\n")
    assert "run folder: run\n" in run.err.read_text()


def test_a_configuration_written_for_the_processor_of_this_machine_says_so(tmp_path):
    words = [*TINY[1:], "launch.nproc=1", "launch.write_only=true"]
    assert TINY[0] == "run.device=cpu"
    said = command(tmp_path, *words, "hydra.run.dir=auto").err.read_text()
    assert "auto/resolved.yaml has run.device=cpu and precision.compute=fp32, chosen for this machine" in said
    assert "chosen for this" not in command(tmp_path, *words, "run.device=cuda").err.read_text()
    assert "chosen for this" not in command(tmp_path, *words, "run.device=cpu").err.read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {num_layer: 3}", "unknown key 'model.num_layer' in {}; did you mean 'model.num_layers'?"),
        ("train: {steps: many}", "train.steps in {}: Value 'many'"),
        ("train: {micro_batch_size: 3}", "train.global_batch_size=16 is not a multiple"),
        ("a: [", "{} is not YAML: "),
        ("just words", "{} holds no keys of a configuration"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, text, said):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert said.format(path) in str(error.value)


def test_variables_of_the_host_are_set_before_gpus_are_looked_for(tmp_path, monkeypatch):
    path, calls = tmp_path / "resolved.yaml", []
    path.write_text(yaml.safe_dump({**to_plain(config()), "run": {"name": "x", "device": "auto"}}))
    monkeypatch.setattr("torch.cuda.is_available", lambda: calls.append("gpus") or False)
    load_config(path, lambda loaded: calls.append("prepare"))
    assert calls[:2] == ["prepare", "gpus"]


def test_a_worker_takes_the_number_of_workers_that_there_are():
    four = SimpleNamespace(size=4, local_size=2)
    adapted = _adapted(config("train.micro_batch_size=1"), four)
    assert (adapted.launch.nproc, adapted.launch.nodes) == (2, "auto")
    with pytest.raises(ConfigError, match="not a multiple of train.micro_batch_size=2 times 4 workers"):
        _adapted(config(), four)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_signal_while_the_command_ends_gives_its_status(unbuffered):
    script = """
import os, signal, sys
from graphmoe.train import main
sys.argv = ["graphmoe.train", "model.num_layer=6"]
try:
    main()
finally:
    os.kill(os.getpid(), signal.SIGINT)
"""
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    line = [sys.executable, "-c", script]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr.startswith("error: unknown key 'model.num_layer'")
    assert done.stderr.endswith("\nSIGINT received: ending\n")


def test_a_signal_before_the_first_step_is_answered_in_one_line_and_leaves_the_folder_free(tmp_path):
    run = Command(tmp_path, (*TINY, *SHORT), slow={"graphmoe.training.setup:micro_batches_of": 30})
    log = tmp_path / "run" / "logs" / "rank0.log"
    run.wait_until(lambda: log.exists() and "data: source synthetic" in log.read_text())
    run.kill(signal.SIGTERM)
    assert run.wait(15) == 128 + signal.SIGTERM
    assert run.err.read_text().endswith("SIGTERM received before the first step: ending\n")
    assert log.read_text().endswith("ERROR SIGTERM: ended before the first step\n")
    assert not (tmp_path / "run" / "resolved.yaml").exists()


def test_a_port_that_was_taken_meanwhile_is_one_line(monkeypatch):
    taken = socket.create_server(("127.0.0.1", 0))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", LAUNCHER_PID: str(os.getppid())}
    for name, value in {**place, **ranks}.items():
        monkeypatch.setenv(name, value)
    with taken, pytest.raises(RunFailed, match="cannot listen at 127.0.0.1:.*the port was free a moment ago"):
        join(config())


@pytest.mark.parametrize("module", ["graphmoe.train", "graphmoe.worker"])
def test_a_signal_while_modules_are_imported_is_answered_in_one_line(tmp_path, module):
    slow = tmp_path / "hydra" / "__init__.py"  # in the place of Hydra's own
    slow.parent.mkdir()
    slow.write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    line, pipe = [sys.executable, "-m", module], subprocess.PIPE
    with subprocess.Popen(line, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == ("", "SIGINT received: ending\n")
    assert process.returncode == 130
