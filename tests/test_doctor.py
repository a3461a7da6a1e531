"""The doctor's report, on a machine with or without a GPU."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from rich.console import Console

from graphmoe import doctor
from graphmoe.config.arguments import run_tool
from graphmoe.config.packages import PACKAGES, Package
from graphmoe.config.schema import AttentionBackend, ExpertsBackend
from graphmoe.plan.experts import FACTS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def report():
    return doctor.examine()


def shown(document) -> str:
    """The text form as a wide terminal shows it."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(doctor.render(document))
    return capture.get()


def test_the_report_is_one_json_document(capsys):
    doctor.main(["format=json"])
    document = json.loads(capsys.readouterr().out)
    parts = ["versions", "host", "environment", "devices", "links", "capabilities", "libraries"]
    assert list(document) == parts


def test_the_text_names_every_library_and_capability(report):
    text = shown(report)
    for entry in report["libraries"] + report["capabilities"]:
        assert entry["name"] in text


def test_a_missing_library_is_reported_with_the_command_that_installs_it(report):
    lacking = Package("no_such_module_here", "no-such-thing", "a feature", "pip install 'thing[all]'")
    found = doctor.examine_package(lacking)
    assert (found["state"], found["version"]) == ("missing", None)
    assert "pip install 'thing[all]'" in shown(report | {"libraries": [found]})


def test_an_installed_library_has_its_version():
    found = doctor.examine_package(Package("numpy", "numpy", "arrays", "pip install numpy"))
    assert (found["state"], found["version"]) == ("installed", sys.modules["numpy"].__version__)


def test_a_library_that_does_not_load_shows_its_error(tmp_path, monkeypatch):
    (tmp_path / "broken_native.py").write_text("raise OSError('libcudart.so.99: cannot open')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = doctor.examine_package(Package("broken_native", "broken", "speed", "build it", True))
    assert found["state"] == "does not load: libcudart.so.99: cannot open"
    assert "libcudart.so.99" in shown(doctor.examine() | {"libraries": [found]})


def test_the_compiler_probe_reports_a_compiler_that_is_not_there(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    finding = doctor.probe_cpp_compiler()
    assert not finding.ok and "no-such-compiler: not found" in finding.detail


def test_the_compiler_probe_reports_the_compilers_own_error(tmp_path, monkeypatch):
    compiler = tmp_path / "failing-c++"
    compiler.write_text("#!/bin/sh\necho 'fatal error: omp.h: No such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    finding = doctor.probe_cpp_compiler()
    assert not finding.ok and "omp.h: No such file" in finding.detail


def test_a_compiler_that_hangs_is_given_up(tmp_path, monkeypatch):
    compiler = tmp_path / "hanging-c++"
    compiler.write_text("#!/bin/sh\nexec sleep 30\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 0.2)
    finding = doctor.probe_cpp_compiler()
    assert not finding.ok and finding.detail == "no answer in 0.2 s"


def test_a_capture_error_is_text_and_not_raised(monkeypatch):
    def fail() -> float:
        raise RuntimeError("CUDA error: operation not permitted\nlong advice")

    monkeypatch.setattr(doctor, "_num_gpus", lambda: 1)
    monkeypatch.setattr(doctor, "_replay_small_graph", fail)
    assert doctor.probe_graphs() == doctor.Finding(
        "device graphs", False, "CUDA error: operation not permitted"
    )


def test_a_replay_with_a_wrong_result_is_no_support(monkeypatch):
    monkeypatch.setattr(doctor, "_num_gpus", lambda: 1)
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_cpu_machine_is_told_that_runs_use_the_cpu(report):
    assert report["devices"] == []
    assert "No usable GPU" in shown(report)


def test_every_backend_that_is_not_our_own_stands_beside_its_package():
    own = ("auto", "sdpa", "padded_flash", "torch")
    keys = {"model.attention_backend": AttentionBackend, "moe.experts": ExpertsBackend}
    wanted = {f"{key}={choice.name}" for key, cls in keys.items() for choice in cls if choice.name not in own}
    wanted |= {f"moe.dispatcher={choice.value}" for choice, facts in FACTS.items() if facts.package}
    assert wanted <= {word for library in PACKAGES for word in library.enables.split(", ")}


@pytest.mark.parametrize("library", PACKAGES, ids=lambda library: library.module)
def test_each_library_is_installed_by_a_command_that_can_be_typed(library):
    assert library.install.startswith("pip install ")
    checked = subprocess.run(["bash", "-n", "-c", library.install], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert not re.search(r"[<>]|\.\.\.", library.install), "a placeholder"


def test_extras_that_the_report_names_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for library in PACKAGES:
        if "graphmoe[" in library.install:
            extra = library.install.split("graphmoe[")[1].split("]")[0]
            assert any(entry.startswith(library.distribution) for entry in extras[extra])


def test_an_unknown_argument_ends_with_status_2_and_the_nearest_key(capsys):
    with pytest.raises(SystemExit) as exit_info:
        run_tool(doctor.main, ["fromat=json"])
    assert exit_info.value.code == 2
    assert "did you mean 'format'?" in capsys.readouterr().err


def test_nothing_but_the_document_is_on_stdout():
    run = subprocess.run(
        [sys.executable, "-m", "graphmoe.doctor", "format=json"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert torch.__version__.startswith(json.loads(run.stdout)["versions"]["torch"])
