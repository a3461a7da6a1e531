"""suite=calibrate of the benchmark tool: rates of one device, cards, points."""

import json

import pytest
import torch

from graphmoe.bench import __main__ as bench
from graphmoe.bench.arguments import card_of_device
from graphmoe.bench.calibrate_suite import calibrate_row, num_segments, rates_of_rows
from graphmoe.bench.jobs import compose_config
from graphmoe.config.schema import ConfigError
from graphmoe.plan.costs.hardware import H200
from graphmoe.plan.costs.rates import CLASSES, default_rates, rates_of, share_at
from tests.bench.test_bench import documented

NVIDIA = default_rates(is_nvidia=True)


def test_every_rate_of_one_device_is_measured_and_a_projection_reads_the_document(tmp_path):
    calibrated = documented("suite=calibrate", "device=cpu", "repeats=2")
    assert [row for row in calibrated["rows"] if row["error"]] == []
    assert set(calibrated["rates"]) == {*CLASSES, "hbm", "segment_us", "host_us"}
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(calibrated))
    found = rates_of(H200, path)
    (row,) = (row for row in calibrated["rows"] if row["rate"] == "head")
    assert found.head == ((32, 64, pytest.approx(row["share"], rel=1e-3)),)
    assert found.host_us == pytest.approx(calibrated["rates"]["host_us"]) and found.node == NVIDIA.node
    assert "| attention/2x24x16/32 | attention_backward |" in bench.render(calibrated)


def test_a_rate_of_several_calls_is_their_work_over_their_time():
    rows = [
        calibrate_row("a", "dense", f"dense/{ms}", 10, 4, 1e6) | {"median_ms": ms, "share": 0.3 / ms}
        for ms in (1, 2)
    ]
    failed = calibrate_row("b", "dense", "dense/0", 20, 4, 1e6) | {"error": "no"}
    assert rates_of_rows([*rows, failed]) == {"dense": [[10, 4, pytest.approx(0.2)]]}


def test_a_share_is_that_of_the_nearest_class_between_its_points():
    points = ((100, 10, 0.1), (100, 1000, 0.4), (800, 10, 0.5))
    assert share_at(0.3, 1, 1) == 0.3
    assert share_at(points, 150, 100) == pytest.approx(0.2)
    ends = (share_at(points, 150, 1), share_at(points, 1, 1e6), share_at(points, 700, 7))
    assert ends == pytest.approx((0.1, 0.4, 0.5))


def test_a_card_is_found_by_its_gpus_name_and_one_with_other_peaks_is_refused(monkeypatch):
    known = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200", "AMD Instinct MI300X VF": "MI300X"}
    for name, card in known.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert card_of_device(torch.device("cuda")).name == card
    for name in ("NVIDIA H200 MIG 1g.18gb", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA GB200"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        with pytest.raises(ConfigError, match=f"{name}, is none that is known; run it on a whole one of"):
            card_of_device(torch.device("cuda"))


def test_segments_are_those_of_the_layers():
    assert num_segments(compose_config("model=deepseek_v2_lite", "model.num_layers=3").model) == 2 + 2 + 2 * 7


def test_ranks_join_to_measure_their_links_and_nothing_else_starts_twice(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="suite=projection is for one process"):
        documented("suite=projection", "device=cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="suite=calibrate is for the ranks of one node"):
        documented("suite=calibrate", "device=cpu")
