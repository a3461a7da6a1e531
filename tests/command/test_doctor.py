"""The doctor's report, on a machine with or without a GPU."""

import json
import os
import re
import subprocess
import tomllib
from importlib.metadata import version
from unittest.mock import Mock

import pytest
import torch

from graphmoe.config.choices import EXPERTS_BACKENDS
from graphmoe.config.packages import PACKAGES, PLUGINS, Package
from graphmoe.config.schema import AttentionBackend
from graphmoe.doctor import machine as doctor
from graphmoe.plan.experts import FACTS
from tests.runs import ROOT, command, text_of
from tests.runtime.host.machine import Machine


@pytest.fixture(scope="module")
def report():
    return doctor.examine()


def test_a_library_has_its_version_or_why_it_cannot_be_used_and_its_command(report, tmp_path, monkeypatch):
    (tmp_path / "broken_native.py").write_text("raise OSError('libcudart.so.99: cannot open')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    lacking = Package("no_such_module_here", "no-such-thing", "a feature", "pip install 'thing[all]'")
    broken = Package("broken_native", "broken", "speed", "build it", True)
    bare = PLUGINS["launcher/joblib"]._replace(plugin="hydra-no-launcher")
    found = [doctor.examine_package(each) for each in (lacking, broken, bare)]
    states = ["missing", "does not load: libcudart.so.99: cannot open", "installed without hydra-no-launcher"]
    assert [each["state"] for each in found] == states
    assert (found[0]["version"], found[2]["plugin"]) == (None, None)
    text = text_of(doctor.render(report | {"libraries": found}))
    assert "pip install 'thing[all]'" in text and "libcudart.so.99" in text
    (joblib,) = [found for found in report["libraries"] if found["name"] == "joblib"]
    plugin = f"hydra-joblib-launcher {version('hydra-joblib-launcher')}"
    assert (joblib["version"], joblib["plugin"]) == (version("joblib"), plugin)
    assert f"{version('joblib')}, {plugin}" in text_of(doctor.render(report))


SCRIPTS = {
    "": "c++: not found",
    "echo 'fatal error: omp.h: No such file' >&2; exit 1": "omp.h: No such file",
    "exec sleep 30": "no answer in 2.0 s",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_compiler_that_is_not_there_fails_or_hangs_is_reported(tmp_path, monkeypatch, script):
    compiler = tmp_path / "c++"
    if script:
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 2.0)
    finding = doctor.examine_capability("compiler", doctor.probe_cpp_compiler)
    assert not finding["ok"] and SCRIPTS[script] in finding["detail"]


def test_a_capture_error_or_a_wrong_replay_is_no_support(monkeypatch):
    fail = Mock(side_effect=RuntimeError("CUDA error: operation not permitted\nlong advice"))
    monkeypatch.setattr(doctor, "_num_gpus", lambda: 1)
    whys = {fail: "CUDA error: operation not permitted", lambda: 1.0: "the replay gave 1.0, not 7.0"}
    for replay, why in whys.items():
        monkeypatch.setattr(doctor, "_replay_small_graph", replay)
        found = doctor.examine_capability("device graphs", doctor.probe_graphs)
        assert found == {"name": "device graphs", "ok": False, "detail": why}


def test_several_gpus_get_a_peer_matrix_and_a_topology(report, monkeypatch):
    monkeypatch.setattr(doctor, "_num_gpus", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} == {0, 1})
    monkeypatch.setattr(doctor, "_topology", lambda: "GPU0 NV18 [x]")
    links = doctor.links()
    assert links["peer_access"] == [[True, True, False], [True, True, False], [False, False, True]]
    text = text_of(doctor.render(report | {"links": links}))
    assert "Peer access" in text and "GPU0 NV18 [x]" in text


def test_every_backend_that_is_not_our_own_stands_beside_its_package():
    own = ("auto", "sdpa", "padded_flash", "torch")
    keys = {"model.attention_backend": AttentionBackend.__members__, "moe.experts": EXPERTS_BACKENDS.names}
    wanted = {f"{key}={name}" for key, names in keys.items() for name in names if name not in own}
    wanted |= {f"moe.dispatcher={choice}" for choice, facts in FACTS.items() if facts.package}
    assert wanted <= {word for library in PACKAGES for word in library.enables.split(", ")}


def test_each_library_is_installed_by_a_command_that_can_be_typed():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for library in PACKAGES:
        assert library.install.startswith("pip install ")
        subprocess.run(["bash", "-n", "-c", library.install], check=True)
        assert not re.search(r"[<>]|\.\.\.", library.install), "a placeholder"
        if "graphmoe[" in library.install:
            extra = library.install.split("graphmoe[")[1].split("]")[0]
            brought = library.plugin or library.distribution
            assert any(entry.startswith(brought) for entry in extras[extra])


def test_nothing_but_the_document_is_on_stdout(tmp_path):
    run = command(tmp_path, "format=json", module="graphmoe.doctor.__main__")
    assert run.wait() == 0, run.err.read_text()
    assert torch.__version__.startswith(json.loads(run.out.read_text())["versions"]["torch"])


def test_variables_that_a_run_would_set_stand_beside_those_that_are_set(monkeypatch):
    for name in filter(doctor.SHOWN.match, list(os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    (row,) = doctor.environment()
    assert (row["name"], row["a_run_sets"]) == ("HSA_KERNARG_POOL_SIZE", "12582912")
    for name, value in {"NCCL_NVLS_ENABLE": "1", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    rows = doctor.environment()
    found = {row["name"]: (row["present"], row["a_run_sets"], row["key"]) for row in rows}
    assert list(found) == sorted(found) and len(found) == 5
    key = "host.nvlink_multicast=false"
    assert found["NCCL_NVLS_ENABLE"] == ("1", None, key)
    assert found["NVSHMEM_DISABLE_NVLS"] == (None, "1", key)
    assert found["NCCL_DEBUG"] == ("INFO", None, None) and found["CUDA_VISIBLE_DEVICES"][0] == ""


def test_numa_nodes_of_the_host_and_of_gpus_are_found(tmp_path, monkeypatch):
    machine = Machine(tmp_path, monkeypatch)
    assert doctor.host()["numa_nodes"] is None and doctor.host()["physical_cores_for_a_run"] == 8
    machine.has_nodes({0: "0-3", 1: "4-7"})
    machine.has_gpus({0: 1, 1: -1})
    assert doctor.host()["numa_nodes"] == 2
    assert (doctor.node_of_gpu(0), doctor.node_of_gpu(1)) == (1, None)
