"""The script that runs graphmoe's peers: transformers trains, errors are rows, a rerun measures nothing."""

import json
import subprocess
import sys

import pytest

from tests.runs import ROOT


def run_peers(*words):
    command = [sys.executable, "benchmarks/peers/run.py", "job=B", "size=tiny", "steps=6", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_peers_are_measured_once_and_errors_are_rows(tmp_path):
    words = "peers=transformers", f"out={tmp_path / 'peers.json'}"
    first = run_peers(*words)
    assert first.returncode == 0, first.stderr
    document = json.loads((tmp_path / "peers.json").read_text())
    trained, refused = document["rows"]
    assert trained["error"] is None and len(trained["seconds"]) == 6
    assert trained["tokens_per_s_per_gpu"] == 128 / trained["seconds"][-1]
    assert all(abs(loss - 5.545) < 0.05 for loss in trained["losses"])  # log(256): random weights and tokens
    assert "no_such" in refused["error"] and "\n" not in refused["error"]
    table = [line for line in first.stdout.splitlines() if line.startswith("| transformers")]
    assert len(table) == 2 and "5.5" in table[0] and "ValueError" in table[1]
    assert run_peers(*words).stdout.splitlines()[:4] == first.stdout.splitlines()[:4]
    refused = run_peers("gpus=2", *words)
    assert refused.returncode == 2 and refused.stderr == "error: gpus=2 is not for job=B; use 1\n"
