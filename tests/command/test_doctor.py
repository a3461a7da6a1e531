"""The doctor's report, on a machine with or without a GPU."""

import json
import os
import re
import subprocess
import tomllib

import pytest
import torch
from rich.console import Console

from graphmoe import doctor
from graphmoe.config.choices import EXPERTS_BACKENDS
from graphmoe.config.packages import PACKAGES, Package
from graphmoe.config.schema import AttentionBackend
from graphmoe.plan.experts import FACTS
from tests.runs import ROOT, command
from tests.runtime.host.machine import Machine


@pytest.fixture(scope="module")
def report():
    return doctor.examine()


def shown(document) -> str:
    """The text form as a wide terminal shows it."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(doctor.render(document))
    return capture.get()


def test_a_missing_library_is_reported_with_the_command_that_installs_it(report):
    lacking = Package("no_such_module_here", "no-such-thing", "a feature", "pip install 'thing[all]'")
    found = doctor.examine_package(lacking)
    assert (found["state"], found["version"]) == ("missing", None)
    assert "pip install 'thing[all]'" in shown(report | {"libraries": [found]})


def test_a_library_that_does_not_load_shows_its_error(tmp_path, monkeypatch):
    (tmp_path / "broken_native.py").write_text("raise OSError('libcudart.so.99: cannot open')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = doctor.examine_package(Package("broken_native", "broken", "speed", "build it", True))
    assert found["state"] == "does not load: libcudart.so.99: cannot open"
    assert "libcudart.so.99" in shown(doctor.examine() | {"libraries": [found]})


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "c++: not found"),
        ("echo 'fatal error: omp.h: No such file' >&2; exit 1", "omp.h: No such file"),
        ("exec sleep 30", "no answer in 2.0 s"),
    ],
)
def test_a_compiler_that_is_not_there_fails_or_hangs_is_reported(tmp_path, monkeypatch, script, said):
    compiler = tmp_path / "c++"
    if script:
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 2.0)
    finding = doctor.probe_cpp_compiler()
    assert not finding.ok and said in finding.detail


def test_a_capture_error_or_a_wrong_replay_is_no_support(monkeypatch):
    def fail() -> float:
        raise RuntimeError("CUDA error: operation not permitted\nlong advice")

    monkeypatch.setattr(doctor, "_num_gpus", lambda: 1)
    monkeypatch.setattr(doctor, "_replay_small_graph", fail)
    assert doctor.probe_graphs() == doctor.Finding(
        "device graphs", False, "CUDA error: operation not permitted"
    )
    monkeypatch.setattr(doctor, "_replay_small_graph", lambda: 1.0)
    assert not doctor.probe_graphs().ok


def test_several_gpus_get_a_peer_matrix_and_a_topology(report, monkeypatch):
    monkeypatch.setattr(doctor, "_num_gpus", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} == {0, 1})
    monkeypatch.setattr(doctor, "_topology", lambda: "GPU0 NV18 [x]")
    links = doctor.links()
    assert links["peer_access"] == [[True, True, False], [True, True, False], [False, False, True]]
    text = shown(report | {"links": links})
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
        checked = subprocess.run(["bash", "-n", "-c", library.install], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr
        assert not re.search(r"[<>]|\.\.\.", library.install), "a placeholder"
        if "graphmoe[" in library.install:
            extra = library.install.split("graphmoe[")[1].split("]")[0]
            assert any(entry.startswith(library.distribution) for entry in extras[extra])


def test_nothing_but_the_document_is_on_stdout(tmp_path):
    run = command(tmp_path, "format=json", module="graphmoe.doctor")
    assert run.wait() == 0, run.err.read_text()
    assert torch.__version__.startswith(json.loads(run.out.read_text())["versions"]["torch"])


@pytest.fixture
def clean(monkeypatch):
    """No variable of those that are shown is set; torch is built for CUDA."""
    for name in list(os.environ):
        if doctor.SHOWN.match(name):
            monkeypatch.delenv(name)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    return monkeypatch


def test_variables_that_a_run_would_set_stand_beside_those_that_are_set(clean):
    clean.setenv("NCCL_NVLS_ENABLE", "1")
    clean.setenv("NCCL_DEBUG", "INFO")
    clean.setenv("CUDA_VISIBLE_DEVICES", "")
    found = {row["name"]: row for row in doctor.environment()}
    assert list(found) == sorted(found) and len(found) == 5
    key = "host.nvlink_multicast=false"
    assert found["NCCL_NVLS_ENABLE"] == {
        "name": "NCCL_NVLS_ENABLE", "present": "1", "a_run_sets": None, "key": key,
    }  # fmt: skip
    assert (found["NVSHMEM_DISABLE_NVLS"]["present"], found["NVSHMEM_DISABLE_NVLS"]["a_run_sets"]) == (
        None,
        "1",
    )
    assert (found["NCCL_DEBUG"]["present"], found["NCCL_DEBUG"]["key"]) == ("INFO", None)
    assert found["CUDA_VISIBLE_DEVICES"]["present"] == ""


def test_on_rocm_the_pool_for_arguments_is_named(clean):
    clean.setattr(torch.version, "cuda", None)
    clean.setattr(torch.version, "hip", "7.0")
    assert [(row["name"], row["a_run_sets"]) for row in doctor.environment()] == [
        ("HSA_KERNARG_POOL_SIZE", "12582912")
    ]


def test_numa_nodes_of_the_host_and_of_gpus_are_found(tmp_path, monkeypatch):
    machine = Machine(tmp_path, monkeypatch)
    assert doctor.host()["numa_nodes"] is None and doctor.host()["physical_cores_for_a_run"] == 8
    machine.has_nodes({0: "0-3", 1: "4-7"})
    machine.has_gpus({0: 1, 1: -1})
    assert doctor.host()["numa_nodes"] == 2
    assert (doctor.node_of_gpu(0), doctor.node_of_gpu(1)) == (1, None)
