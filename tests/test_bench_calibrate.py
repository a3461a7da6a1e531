"""suite=calibrate and suite=projection of the benchmark tool: rates, and runs beside what is projected."""

from __future__ import annotations

import json

import pytest
import torch

from graphmoe.bench import __main__ as bench
from graphmoe.bench import projection_suite
from graphmoe.bench.calibrate_suite import CalibrateRow, card_of_device, num_segments, rates_of_rows
from graphmoe.bench.own_process import ProcessFailed
from graphmoe.bench.projection_suite import FULL, TINY, projected, projection_cases
from graphmoe.bench.words import compose_config
from graphmoe.config.schema import ConfigError
from graphmoe.plan.costs.hardware import H200
from graphmoe.plan.costs.rates import CLASSES, NVIDIA, rates_of, share_at
from graphmoe.project.projected_memory import allocated_bytes
from graphmoe.run.files import METRICS_FILE, SUMMARY_FILE


def run(*words: str):
    return bench.bench(bench.parse_args(bench.BenchArgs, words, prog="graphmoe.bench"), words)


@pytest.fixture(scope="module")
def calibrated():
    return run("suite=calibrate", "device=cpu", "repeats=2")


def test_every_rate_of_one_device_is_measured_and_a_projection_reads_the_document(calibrated, tmp_path):
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
    rows = [CalibrateRow("a", "dense", f"dense/{n}", 10, 4, 1e6, ms, 0.3 / ms) for n, ms in enumerate((1, 2))]
    failed = CalibrateRow("b", "dense", "dense/0", 20, 4, 1e6, error="no")
    assert rates_of_rows([*rows, failed]) == {"dense": [[10, 4, pytest.approx(0.2)]]}


def test_a_share_is_that_of_the_nearest_class_between_its_points():
    points = ((100, 10, 0.1), (100, 1000, 0.4), (800, 10, 0.5))
    assert share_at(0.3, 1, 1) == 0.3
    assert share_at(points, 150, 100) == pytest.approx(0.2)
    assert (share_at(points, 150, 1), share_at(points, 1, 1e6), share_at(points, 700, 7)) == (0.1, 0.4, 0.5)


@pytest.mark.parametrize(
    ("name", "card"),
    [("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"), ("NVIDIA B200", "B200"),
     ("AMD Instinct MI300X VF", "MI300X")],
)  # fmt: skip
def test_a_card_is_found_by_its_gpus_name(name, card, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert card_of_device(torch.device("cuda")).name == card


@pytest.mark.parametrize(
    "name",
    ["NVIDIA H200 MIG 1g.18gb", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100 PCIe", "NVIDIA H100 NVL",
     "NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA A100-SXM4-80GB"],
)  # fmt: skip
def test_a_gpu_with_other_peaks_than_a_cards_is_refused_with_its_name(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    with pytest.raises(
        ConfigError, match=f"{name}, is none that is known; run it on a whole one of MI300X, .*B200"
    ):
        card_of_device(torch.device("cuda"))


def test_segments_are_those_of_the_layers():
    assert num_segments(compose_config("model=deepseek_v2_lite", "model.num_layers=3").model) == 2 + 2 + 2 * 7


def test_ranks_join_to_measure_their_links_and_nothing_else_starts_twice(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="suite=projection is for one process"):
        run("suite=projection", "device=cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="suite=calibrate is for the ranks of one node"):
        run("suite=calibrate", "device=cpu")


def test_every_run_of_the_full_suite_can_be_projected():
    cases = projection_cases(FULL, "cuda", 1, 8)
    assert len(cases) >= 6
    for case in cases:
        places, step = projected(compose_config(*case.words), H200, None, 1)
        assert 0 < allocated_bytes(places[0]) < 141e9 and step.step_s > 0, case.name
    _, of_eight = (compose_config(*case.words) for case in projection_cases(TINY, "cpu", 8, 8))
    assert of_eight.train.global_batch_size == 8 * of_eight.train.micro_batch_size


def test_rows_say_how_far_a_projection_is_from_what_the_job_wrote(monkeypatch, tmp_path):
    (case, _) = projection_cases(TINY, "cpu", 1, 2)
    places, step = projected(compose_config(*case.words), H200, None, 1)
    gib, step_s = allocated_bytes(places[0]) / 2**30, step.step_s

    def train(words, folder, limit_s):
        if "recompute.all=true" in words:
            raise ProcessFailed("no memory")
        folder.mkdir()
        rows = [{"loss": 1, "step_s": seconds} for seconds in (9, 9, step_s / 1.05, step_s / 1.05)]
        (folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
        summary = {"peak_memory_gib": gib / 1.2, "device_memory_gib": 2 * gib}
        (folder / SUMMARY_FILE).write_text(json.dumps(summary))

    monkeypatch.setattr(projection_suite, "train", train)
    document = run("suite=projection", "device=cpu", "repeats=2")
    row, failed = document["rows"]
    assert (row["memory_error"], row["time_error"]) == (pytest.approx(0.2), pytest.approx(0.05, rel=1e-2))
    assert row["misses"] == ["memory"] and failed["error"] == "no memory"
    text = bench.render(document)
    assert "+20.0% miss" in text and "| recompute | failed: no memory" in text
    assert "Misses, memory beyond 5% or time beyond 10%: plain." in text


def test_a_word_that_the_suite_sets_is_refused():
    with pytest.raises(ConfigError, match="the suite sets launch.nproc; use nproc="):
        projection_cases(TINY, "cpu", 1, 2, overrides="launch.nproc=2")


def test_words_that_one_run_refuses_leave_the_others(tmp_path):
    words = "parallel.ep=2,moe.dispatcher=alltoall"
    cases = {case.name: case for case in projection_cases(FULL, "cuda", 2, 8, overrides=words)}
    assert cases.keys() == FULL.runs.keys()
    row = projection_suite.run_projection_case(cases["lite_mbs1_layer"], H200, None, 2, 8, 1.0)
    assert row.error is not None and "graph.scope=layer captures moe_dispatch" in row.error
    compose_config(*cases["lite_mbs1_none"].words)
    with pytest.raises(ConfigError, match="model.top_k=999"):
        projection_cases(FULL, "cuda", 2, 8, overrides="model.top_k=999")
