"""Suites of the benchmark tool that run jobs or rate a device: cases, rows, charts, rates, cards."""

import functools
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from graphmoe.bench import BenchArgs, SuiteName, card_of_device, cases, jobs, ops_suite, regress_suite, runs
from graphmoe.bench import __main__ as bench
from graphmoe.bench.cases import CaseFailed
from graphmoe.bench.jobs import Trained, train
from graphmoe.bench.runs import RECORDED_STEPS, projected_run, projection_cases
from graphmoe.command import hydra
from graphmoe.config.schema import ConfigError
from graphmoe.plan.costs.hardware import H200
from graphmoe.plan.costs.rates import CLASSES, default_rates, rates_of, share_at
from graphmoe.run import machine
from graphmoe.trace.events import read_trace
from graphmoe.training.memory import allocated_bytes
from tests.bench.test_bench import CPU, documented, table_of
from tests.kineto import two_steps
from tests.runs import ROOT, refusal

EAGER = "overrides=compile=none,train.global_batch_size=8,data.seq_len=8"
compose_config = functools.cache(hydra.compose_config)  # cases of several tests have the same words
SUMMARY = {"peak_memory_gib": 2.0, "device_memory_gib": 4.0, "time_to_first_step_s": 9.0}


@pytest.fixture(autouse=True)
def composed_once(monkeypatch):
    monkeypatch.setattr(jobs, "compose_config", compose_config)


def test_overrides_of_the_user_replace_those_of_the_suite():
    given = "model=tiny,train.global_batch_size=6,passes.disabled=[fuse_loss,fuse_router]"
    sizes = {"micro_batch_sizes": [3], "seq_lens": [64], "repeats": 500, "scopes": "[[attn,loss],none]"}
    cases = runs.step_cases(BenchArgs(SuiteName.step, overrides=given, **sizes), "cpu", True, 1)
    assert [case.name for case in cases] == [f"mbs3_s64/{s}" for s in ("none", "attn+loss", "none_again")]
    config = compose_config(*cases[1].row["overrides"])
    assert (config.model.name, config.model.num_layers) == ("tiny", 4)  # not 6: another model's number
    assert (config.train.global_batch_size, config.train.micro_batch_size, config.data.seq_len) == (6, 3, 64)
    assert config.passes.disabled == ["fuse_loss", "fuse_router"]
    assert (config.graph.scope, config.checkpoint.enabled) == (["attn", "loss"], False)
    timed = config.graph.warmup_steps + 1 + jobs.WARM_UP_STEPS + 500
    assert config.profile.steps == [timed + 1, timed + RECORDED_STEPS]
    assert config.train.steps == config.train.log_interval == timed + RECORDED_STEPS


@pytest.mark.slow
def test_steps_are_rows_of_processes_or_of_the_reason(caplog):
    caplog.set_level("INFO")
    words = ["suite=step", "device=cpu", "overrides=compile=none", "repeats=3", "seq_lens=16"]
    document = documented(*words, "scopes=partial,full_iteration")
    bad, good = document["rows"]
    assert bad["scope"] == "partial" and "graph.scope=partial captures compiled segments" in bad["error"]
    assert good["error"] is None and good["graphs"] == 1
    assert len(good["samples_ms"]) == 3 and good["tokens"] == 32
    assert good["tokens_per_s"] == pytest.approx(32e3 / good["median_ms"])
    assert good["host_ms"] > 0 and good["capture_s"] > 0 and good["idle_share"] is None
    assert "[2/2] mbs2_s16/full_iteration: " in caplog.text
    assert "| mbs2_s16 | partial | failed: graph.scope=partial captures" in table_of(document)[2]


def test_a_row_has_both_floors_and_what_the_recorded_steps_say(tmp_path):
    config = compose_config("model=deepseek_v2_lite", "model.num_layers=6", "train.global_batch_size=4")
    seconds = [9.0, 0.1912, 0.1900, 0.1930, *[9.0] * RECORDED_STEPS]
    trace = read_trace(two_steps().write(tmp_path / "a.json"))  # 1400 of 1900 us are busy in two steps
    found = Trained([{"step_s": each} for each in seconds], SUMMARY, {"pool_bytes": 5}, trace)
    row = runs.step_numbers(config, 1, found, repeats=3)
    assert row["tokens"] == 4 * 4096
    floors = (row["floor_ms"], row["floor_with_optimizer_ms"])
    assert floors == pytest.approx((95.6, 122.7), abs=0.05)  # docs/benchmarks: 6 layers, 4 sequences
    assert (row["median_ms"], row["peak_gib"], row["pool_bytes"], row["graphs"]) == (191.2, 2.0, 5, None)
    assert row["time_over_floor"] == pytest.approx(2.0, abs=0.001)
    assert row["tflops"] == pytest.approx(790 * row["share_of_floor_rate"]) == pytest.approx(395, abs=1)
    assert row["idle_share"] == pytest.approx(1 - 0.7 / 191.2) and row["host_ms"] > 0
    largest = row["kernels"][0]
    assert (largest["name"], largest["calls"]) == ("triton_poi_fused_adamw", pytest.approx(2 / 3))


def rungs(full=False, device="cpu", ranks=2, memory=math.inf, **given):
    return runs.ladder_cases(BenchArgs(SuiteName.ladder, **given), device, full, ranks, memory)


SIZES = ["mbs1", "mbs1_fp8", "mbs2", "mbs2_fp8"]


def test_every_rung_can_run_and_the_last_has_what_those_before_it_set():
    cases = rungs(passes=3)
    assert [case.name for case in cases] == [*runs.RUNGS, *SIZES]
    configs = {case.name: compose_config(*case.row["overrides"]) for case in cases}
    first, last = configs["baseline"], configs["mbs2_fp8"]
    assert last.graph.scope == "full_iteration" and last.pipeline.ep_overlap and last.host.manual_gc
    assert (last.train.micro_batch_size, last.train.global_batch_size) == (2, 16)
    assert (last.precision.fp8, configs["mbs2"].precision.fp8) == ("rowwise", "none")
    assert (first.moe.dispatcher, first.passes.disabled) == ("alltoall", ["fuse_loss"])
    assert (first.train.micro_batch_size, first.train.global_batch_size, first.parallel.ep) == (1, 8, 2)
    assert [configs[name].moe.balance for name in ("symm", "replicas")] == ["none", "replicas"]
    long = {name for name, config in configs.items() if config.train.steps > first.train.steps}
    assert long == {"ep_overlap", "host_tuning"}  # 300 in three passes
    assert configs["ep_overlap"].train.steps == first.train.steps + 80
    for name in configs:  # so that no default of another version changes a rung
        words = [jobs.key_of(word) for word in cases[[*configs].index(name)].row["overrides"]]
        named = {"moe.dispatcher", "graph.scope", "pipeline.ep_overlap", "train.micro_batch_size"}
        assert named < {*words}, name


def test_one_gpu_leaves_out_exchanges():
    cases = rungs(ranks=1)
    left = [name for name in runs.RUNGS if name not in runs.OF_SEVERAL]
    assert [case.name for case in cases][:9] == left + SIZES[:3]
    configs = [compose_config(*case.row["overrides"]) for case in cases]
    ways = {(c.moe.dispatcher, c.pipeline.ep_overlap, c.parallel.ep) for c in configs}
    assert ways == {("local", False, 1)}


@pytest.mark.parametrize(
    ("gib", "given", "recompute"),
    [
        (140, None, ()),
        (120, None, ("mbs4", "mbs4_fp8")),
        (100, None, (*runs.RUNGS, "mbs2", "mbs2_fp8", "mbs4", "mbs4_fp8")),
        (100, "recompute.segments=[attn]", ()),
        (100, "model.num_layers=3", ()),
    ],
)
def test_norms_are_recomputed_if_a_run_does_not_fit(gib, given, recompute):
    cases = rungs(True, "cuda", 4, overrides=given, memory=gib * 2**30)
    assert [c.name for c in cases if "recompute.ops=[layernorm]" in c.row["overrides"]] == [*recompute]
    assert all("recompute.ops=[layernorm]" in c.row["what"] for c in cases if c.name in recompute)


def made(rung, rates, is_long=False):
    rows = [{"rung": rung, "pass": n, "tokens_per_s": r, "error": None} for n, r in enumerate(rates, 1) if r]
    rows = [row | {"samples_ms": [*[10.0] * 97, 10.0, 11.0, 30.0] if is_long else [1.0]} for row in rows]
    failed = [{"rung": rung, "pass": n, "error": "no memory"} for n, r in enumerate(rates, 1) if not r]
    return [*rows, *failed]


def test_gains_are_medians_of_pairs_with_their_spread():
    rows = [*made("baseline", (100, 50, 200)), *made("loss_fusion", (110, 56, 226)), *made("symm", (0, 0, 0))]
    rows += made("partial", (111, 0, 225)) + made("host_tuning", (90, 45, 180), True) + made("mbs1", (9, 9))
    found = runs.ladder_rows(rows)
    names = "baseline loss_fusion symm partial partial host_tuning mbs1"
    assert [row["rung"] for row in found] == names.split()
    assert [row["error"] for row in found] == [None, None, "no memory", None, "no memory", None, None]
    said = ["", "+12.0% (+10.0% to +13.0%)", "no gain (-0.4% to +0.9%)", "-19.5% (-20.0% to -18.9%)", ""]
    assert [row["gain"] for row in found if not row["error"]] == said
    assert [row["tokens_per_s"] for row in found if not row["error"]] == [100, 110, 111, 90, 9]
    slow = found[5]
    assert (slow["p50_ms"], slow["p99_ms"], slow["p99_over_p50"]) == (10, pytest.approx(11.19), 1.119)
    assert "p99_ms" not in found[0] and len(slow["jobs"]) == 3
    single = runs.ladder_rows([row for row in rows if row["pass"] == 1])
    assert single[1]["gain"] == "+10.0%"


def test_a_ladder_alternates_and_goes_on_with_what_is_missing(tmp_path, monkeypatch):
    out, ran, clock = tmp_path / "ladder.json", [], [0]

    def fake_train(overrides, limit_s):
        symm, fused = "moe.dispatcher=symm" in overrides, "passes.disabled=[]" in overrides
        ran.append("s" if symm else "l" if fused else "b")
        if len(ran) == killed_at:
            raise KeyboardInterrupt
        clock[0] += wait_s
        if symm and fused and "pipeline.ep_overlap=false" in overrides and limit_s < 500:
            raise CaseFailed("not done")
        return Trained([{"loss": 1.0, "step_s": 1.0, "rank_load": 1.0}] * 50, SUMMARY, {}, None)

    def run(*words):
        ran.clear()
        with pytest.raises((KeyboardInterrupt, SystemExit)) as ended:
            bench.main(["suite=ladder", "device=cpu", "only=baseline,loss,symm", f"out={out}", *words])
        return "".join(ran), getattr(ended.value, "code", "killed")

    monkeypatch.setattr(jobs, "train", fake_train)
    for module in (cases, runs):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    killed_at, wait_s = 5, 0
    assert run() == ("bls" + "sl", "killed") and not out.exists()
    killed_at, wait_s = None, 7
    assert run("stop_after_s=6") == ("l", None) and not out.exists()
    killed_at, wait_s = 4, 0
    assert run("limit_s=600") == ("s" + "sb" + "b", "killed")
    killed_at = None
    assert run() == ("bls", 1)
    document = json.loads(out.read_text())
    errors = [[job["error"] for job in row["jobs"]] for row in document["rows"][:3]]
    assert errors == [[None] * 3, [None] * 3, [None, None, "not done"]] and len(document["rows"]) == 4
    assert [job["pass"] for job in document["rows"][1]["jobs"]] == [1, 2, 3]
    assert "| `symm` | GPUs read each other's tokens | failed: not done |" in bench.render(document)
    assert "| no gain (+0.0% to +0.0%) |" in table_of(document)[3]
    assert run() == ("", 1) and json.loads(out.read_text())["rows"] == document["rows"]
    assert run("repeats=9")[0] == "bls" + "slb" + "bls"
    alone = documented("suite=ladder", "device=cpu", "only=mbs2", "passes=1")["rows"]
    what = {row["rung"]: row["what"] for row in alone if row["gain"] == ""}
    assert what == {"mbs2": "as host_tuning", "mbs2_fp8": "as host_tuning, in fp8"}
    rows = out.with_suffix(".rows.jsonl")
    rows.write_text(rows.read_text().replace('"commit": "', '"commit": "0'))
    assert run()[0] == "bls" + "slb" + "bls"


@pytest.mark.slow
def test_a_ladder_has_rates_gains_a_chart_and_a_reason(tmp_path):
    out = tmp_path / "ladder.json"
    only = "only=baseline,symm,partial"
    with pytest.raises(SystemExit, match="1"):
        bench.main(["suite=ladder", "device=cpu", "repeats=10", EAGER, only, f"out={out}", "passes=1"])
    document = json.loads(out.read_text())
    baseline, symm, partial = document["rows"]
    for row in (baseline, symm):
        assert row["error"] is None and row["tokens"] == 64 and len(row["samples_ms"]) == 10
        assert row["tokens_per_s"] == pytest.approx(64 / 2 / row["median_ms"] * 1e3)
        assert 1 < row["rank_load"] <= 2 and row["device_gib"] == row["peak_gib"] > 0
    assert baseline["replica_load"] is None and symm["replica_load"] is None
    gain = symm["tokens_per_s"] / baseline["tokens_per_s"] - 1
    assert symm["gain"] == ("no gain" if abs(gain) < 0.01 else f"{gain:+.1%}")
    assert symm["loss"] == pytest.approx(baseline["loss"], rel=1e-5)  # the same tokens, in the same order
    assert "graph.scope=partial captures compiled segments" in partial["error"]
    assert f"| {symm['rank_load']:.2f}" in table_of(document)[3]
    assert out.with_suffix(".png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("words", ["model=mixtral_8x7b,model.num_layers=2", "recompute=all", "compile=none"])
def test_another_choice_drops_defaults_that_it_need_not_have(words):
    config = compose_config(*rungs(True, "cuda", 4, overrides=words)[0].row["overrides"])
    assert config.recompute.ops == [] and config.data.seq_len == 4096


def wait_for_jobs(folder, reached):
    """Wait until the processes of jobs whose run is in a folder are so many."""
    for _ in range(1200):
        found = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
        if reached(sum(any(str(folder) in word for word in words) for words in found)):
            return
        time.sleep(0.05)
    raise AssertionError("not within a minute")


def endless():
    given = rungs(overrides="compile=none")[0].row["overrides"]
    return [*(word for word in given if jobs.key_of(word) != "train.steps"), "train.steps=100000"]


@pytest.mark.slow
def test_a_job_that_is_late_is_ended_with_its_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(CaseFailed, match="not done after limit_s=15 seconds, compilation included"):
        train(endless(), 15)
    wait_for_jobs(tmp_path, lambda number: number == 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_is_killed_leaves_no_job(tmp_path, number):
    code = "import sys, tempfile; from graphmoe.bench.jobs import train;"
    code += "tempfile.tempdir = sys.argv[1]; train(sys.argv[2:], 300)"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), *endless()], cwd=ROOT)
    wait_for_jobs(tmp_path, lambda number: number >= 2 or process.poll() is not None)
    process.send_signal(number)
    assert process.wait(30) == -number
    wait_for_jobs(tmp_path, lambda number: number == 0)


@pytest.mark.slow
def test_every_run_of_the_projection_suite_can_be_projected():
    cases = projection_cases(BenchArgs(SuiteName.projection), "cuda", True, 1)
    assert len(cases) >= 6
    for case in cases:
        places, step = projected_run(compose_config(*case.row["overrides"]), H200, None, 1)
        assert 0 < allocated_bytes(places[0]) < 141e9 and step["step_time_s"] > 0, case.name
    of_eight = projection_cases(BenchArgs(SuiteName.projection), "cpu", False, 8)
    config = compose_config(*of_eight[-1].row["overrides"])
    assert config.train.global_batch_size == 8 * config.train.micro_batch_size


def test_rows_say_how_far_a_projection_is_from_the_job(monkeypatch):
    case, _ = projection_cases(BenchArgs(SuiteName.projection, repeats=2), "cpu", False, 1)
    places, step = projected_run(compose_config(*case.row["overrides"]), H200, None, 1)
    gib, step_s = allocated_bytes(places[0]) / 2**30, step["step_time_s"]

    def fake_train(overrides, limit_s):
        if "recompute.all=true" in overrides:
            raise CaseFailed("no memory")
        rows = [{"loss": 1, "step_s": seconds} for seconds in (9, 9, step_s / 1.05, step_s / 1.05)]
        return Trained(rows, {"peak_memory_gib": gib / 1.2, "device_memory_gib": 2 * gib}, {}, None)

    monkeypatch.setattr(jobs, "train", fake_train)
    document = documented("suite=projection", "device=cpu", "repeats=2")
    row, failed = document["rows"]
    assert (row["memory_error"], row["time_error"]) == (pytest.approx(0.2), pytest.approx(0.05, rel=1e-2))
    assert row["misses"] == ["memory"] and failed["error"] == "no memory"
    text = bench.render(document)
    assert "+20.0% miss" in text and "| recompute | failed: no memory" in text
    assert "Misses, memory beyond 5% or time beyond 10%: plain." in text
    args = BenchArgs(SuiteName.projection, overrides="parallel.ep=2,moe.dispatcher=alltoall")
    configs = [case.config for case in projection_cases(args, "cuda", True, 2)]
    refused = [str(config) for config in configs if isinstance(config, ConfigError)]
    assert "graph.scope=layer captures moe_dispatch" in refused[0] and len(refused) < 9


def test_every_case_of_regress_is_a_valid_configuration_or_an_operation():
    for name, (steps, _) in regress_suite.JOBS.items():
        job = regress_suite.job_of(BenchArgs(SuiteName.regress), "cuda", name, True)
        config = compose_config(*job.row["overrides"])
        assert config.train.steps == config.graph.warmup_steps + 1 + jobs.WARM_UP_STEPS + steps
    assert regress_suite.OPERATIONS.keys() < {each.name for each in ops_suite.ops_suite(True, CPU)[0]}


def test_rows_beside_their_baselines_are_worse_better_or_new(tmp_path, monkeypatch, capsys):
    words, folder, seconds = ["suite=regress", "device=cpu"], tmp_path / "benchmarks" / "baselines", [1.0]

    def fake_train(overrides, limit_s):
        return Trained([{"step_s": seconds.pop(0) if seconds[1:] else seconds[0]}] * 20, SUMMARY, {}, None)

    def verdicts():
        return {row["case"]: row["verdict"] for row in documented(*words)["rows"] if row["verdict"]}

    monkeypatch.setattr(jobs, "train", fake_train)
    monkeypatch.setattr(regress_suite, "FOLDER", folder)
    monkeypatch.setattr(regress_suite, "ops_suite", lambda *_: ([], []))
    for module in (machine, regress_suite):
        monkeypatch.setattr(module, "device_name", lambda device: "NVIDIA H200 NVL")
    said = "no benchmarks/baselines/h200_nvl.json, with baselines of NVIDIA H200 NVL; write it by: python -m "
    assert f"{said}graphmoe.bench suite=regress write=true" in refusal(bench.main, capsys, *words)
    bench.main([*words, "write=true"])
    trained = [name for name in regress_suite.JOBS if name != "start"]
    for seconds[0], found in ((0.98, {}), (1.02, {}), (0.9, "better"), (1.04, "worse")):
        assert verdicts() == (found and dict.fromkeys(trained, found))
    with pytest.raises(SystemExit, match="1"):
        bench.main([*words, "only=train/bare"])
    seconds[:] = [1.5, 1.02]
    bench.main([*words, "only=train/bare"])  # the second measurement counts
    (folder / "h200_nvl.json").write_text((folder / "h200_nvl.json").read_text().replace("start", "gone"))
    assert verdicts() == {"start": "new"}
    assert documented(*words)["left_out"] == ["gone gone_s: it was not measured, and has a baseline"]
    rows = [{"case": "a", "memory_bytes": 104, "start_s": 11, "error": None}, {"case": "b", "error": "no"}]
    *found, failed = regress_suite.compared(rows, {"a memory_bytes": 100, "a start_s": 10})
    assert [(row["verdict"], round(row["change"], 3)) for row in found] == [("worse", 0.04), ("", 0.1)]
    assert failed == rows[1]


NVIDIA = default_rates(is_nvidia=True)


def test_every_rate_of_one_device_is_measured_and_a_projection_reads_the_document(tmp_path):
    calibrated = documented("suite=calibrate", "device=cpu", "repeats=2")
    assert [row for row in calibrated["rows"] if row["error"]] == []
    assert set(calibrated["rates"]) == {*CLASSES, "fp8_quantise", "hbm", "segment_us", "host_us"}
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(calibrated))
    found = rates_of(H200, path)
    (row,) = (row for row in calibrated["rows"] if row["rate"] == "head")
    assert found.head == ((32, 64, pytest.approx(row["share"], rel=1e-3)),)
    assert found.host_us == pytest.approx(calibrated["rates"]["host_us"]) and found.node == NVIDIA.node
    assert "| attention/2x24x16/32 | attention_backward |" in bench.render(calibrated)


def test_a_share_is_that_of_the_nearest_class_between_its_points():
    points = ((100, 10, 0.1), (100, 1000, 0.4), (800, 10, 0.5))
    assert share_at(0.3, 1, 1) == 0.3
    # 10 seconds per FLOP at size 10 and 2.5 at 1000: linear in 1 / size
    assert share_at(points, 150, 100) == pytest.approx(1 / (2.5 + 7.5 * (0.01 - 0.001) / (0.1 - 0.001)))
    ends = (share_at(points, 150, 1), share_at(points, 1, 1e6), share_at(points, 700, 7))
    assert ends == pytest.approx((0.1, 0.4, 0.5))


def test_a_card_is_found_by_its_gpus_name_and_one_with_other_peaks_is_refused(monkeypatch):
    def card_of(name):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        return card_of_device(torch.device("cuda"))

    known = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200", "AMD Instinct MI300X VF": "MI300X"}
    assert {name: card_of(name).name for name in known} == known
    for name in ("NVIDIA H200 MIG 1g.18gb", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA GH200 480GB"):
        with pytest.raises(ConfigError, match=f"need a GPU with known peak rates, not {name}; use one of"):
            card_of(name)
