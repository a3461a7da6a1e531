"""Projections with rates of this GPU, beside short runs on it."""

import json

import pytest
import torch

from graphmoe.bench import __main__ as bench
from graphmoe.plan.costs.hardware import CARDS

NEEDED_BYTES = 70 * 2**30
"""Memory of the runs: 61.6 GiB of tensors, the device's context, and what the allocator keeps."""


def run(*words: str):
    return bench.bench(bench.parse_args(bench.BenchArgs, words, prog="graphmoe.bench"), words)


@pytest.mark.alone
def test_memory_and_time_of_runs_are_near_what_is_projected_with_rates_of_this_gpu(tmp_path):
    name, (free, _) = torch.cuda.get_device_name(), torch.cuda.mem_get_info()
    if not any(card.name in name for card in CARDS.values()):
        pytest.skip(f"the peaks of {name} are not known")
    if free < NEEDED_BYTES:
        pytest.skip(f"{free / 2**30:.0f} GiB of the GPU are free; the runs need {NEEDED_BYTES / 2**30:.0f}")
    sizes = "copy,dense/2048,grouped/2048x1408x64,router/2048x64,attention/16x192x128,head/2048"
    calibrated = run("suite=calibrate", f"only={sizes}", "repeats=5", "limit_s=300")
    assert [row for row in calibrated["rows"] if row["error"]] == []
    rates = calibrated["rates"]
    assert 0.3 < rates["hbm"] < 1 and all(0 < share < 1 for _, _, share in rates["grouped"])
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(calibrated))
    rows = run("suite=projection", "only=lite_mbs1", f"rates={path}", "repeats=5", "limit_s=500")["rows"]
    assert [row["case"] for row in rows] == ["lite_mbs1_none", "lite_mbs1_layer"]
    for row in rows:
        assert row["error"] is None, row
        assert abs(row["memory_error"]) < 0.05, row
        assert abs(row["time_error"]) < 0.25, row  # a shared machine's steps are slower at times
