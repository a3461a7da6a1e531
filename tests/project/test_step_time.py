"""The projected time of a step: what it is made of, and how it answers to rates and schedules."""

import json
from dataclasses import replace
from typing import Any

import pytest

from graphmoe.bench.jobs import compose_config
from graphmoe.bench.runs import projected_run
from graphmoe.config.schema import ConfigError, Fp8Recipe, ParallelConfig, RunConfig
from graphmoe.pipeline_view.plans import load_preset
from graphmoe.plan.costs.hardware import CARDS, H200, MI300X
from graphmoe.plan.costs.rates import CLASSES, FP8, FP8_RATES, Speeds, default_rates, rates_of
from graphmoe.plan.costs.segment_times import REPLICA_PLAN
from graphmoe.plan.rules import resolve
from graphmoe.project.arguments import ProjectArgs, completed
from graphmoe.project.document import project
from graphmoe.project.tables import render
from graphmoe.training.memory import allocated_bytes
from tests.plan.costs.test_activations import MODEL
from tests.runs import ROOT, config, text_of
from tests.test_docs import rows_below

NVIDIA = default_rates(is_nvidia=True)
RAW = ROOT / "docs/benchmarks/projection_h200"
RAW_FP8 = ROOT / "docs/benchmarks/fp8_h200"
EIGHT = ("launch.fake_world=null", "launch.nproc=8", "train.global_batch_size=16")


def document(card: str, *words: str, **more: Any):
    args = ProjectArgs(card, **more)
    return project(completed(config(*MODEL, *EIGHT, *words), args), args)


@pytest.mark.parametrize("card", CARDS)
def test_every_card_has_a_projection(card):
    found = document(card)
    assert 0 < found["mfu"] < 1 and found["step_time_s"] > 0 and found["bubble"] == 0
    per_gpu = found["global_batch_size"] * found["seq_len"] / found["step_time_s"] / 8
    assert found["tokens_per_s_per_gpu"] == pytest.approx(per_gpu)
    times = found["time_s"]
    busy = sum(times["forward_by_segment"].values()) + sum(times["backward_by_segment"].values())
    rest = times["exposed_gradients"] + times["update"]
    step = max(found["micro_batches"] * busy + rest, times["host"])
    assert found["step_time_s"] == pytest.approx(step)


def test_zero_bubble_schedules_wait_less_than_1f1b():
    words = ("parallel.pp=4", "model.num_layers=8", "train.global_batch_size=64", "compile.enabled=true")
    names = ("gpipe", "1f1b", "zb1p")
    gpipe, one_f, zero = (document("h200", *words, f"pipeline.schedule={x}")["bubble"] for x in names)
    assert 0 < zero < one_f == pytest.approx(gpipe, rel=0.05)


@pytest.mark.parametrize(("recipe", "size"), [("none", 2), ("rowwise", 1)])
def test_replicas_cost_a_plan_and_their_traffic(recipe, size):
    """Weights of one expert come in the forward and again in the backward, and a gradient goes home."""
    words = ("parallel.ep=8", "moe.dispatcher=symm", f"precision.fp8={recipe}", "moe.receive_budget=1.015625")
    plain, balanced = (  # both with as much room
        document("h200", *words, f"moe.balance={balance}") for balance in ("none", "replicas")
    )

    def more(way: str) -> dict[str, float]:
        before, after = (found["time_s"][f"{way}_by_segment"] for found in (plain, balanced))
        return {name: after[name] - before[name] for name in before if after[name] != before[name]}

    forward, backward = more("forward"), more("backward")
    of_expert = Speeds(H200, NVIDIA).pass_on(3 * 128 * 80, in_node=True)
    assert forward == pytest.approx({"moe_preprocess": REPLICA_PLAN, "moe_experts": size * of_expert})
    assert backward == pytest.approx({"moe_experts": (size + 4) * of_expert})
    assert balanced["buffers_gb"]["dispatch"] > plain["buffers_gb"]["dispatch"]
    assert ["on each rank: 1; the time below" in text_of(render(each)) for each in (plain, balanced)] == [
        False,
        True,
    ]


def rate_of(schedule: str) -> float:
    """Tokens/s of a GPU for qwen3_235b_a22b on four nodes of MI355X; experts' W comes with I."""
    args = ProjectArgs("mi355x", nodes=4)
    run = RunConfig(model=load_preset("qwen3_235b_a22b"), parallel=ParallelConfig(pp=4, ep=8))
    run.train.micro_batch_size, run.pipeline.schedule, run.data.seq_len = 1, schedule, 4096
    run.moe.dispatcher, run.graph.scope = "alltoall", "none"
    found = project(resolve(completed(run, args)), args)
    assert found["layout"]["ep"] == 8 and found["micro_batches"] == 16
    return float(found["tokens_per_s_per_gpu"])


def test_zbv_gains_as_much_as_amd_measured_where_weight_gradients_of_experts_are_not_put_off():
    assert rate_of("zbv") / rate_of("1f1b") == pytest.approx(1.08, abs=0.03)


def test_what_is_computed_again_takes_time():
    wide = ("model.hidden_size=2048", "model.expert_ffn_size=1408")
    once, twice = (
        sum(document("h200", *wide, word)["time_s"]["backward_by_segment"].values())
        for word in ("recompute.all=false", "recompute.all=true")
    )
    assert twice > 1.1 * once


def test_rates_of_nvidia_are_those_of_the_raw_data():
    one, two = (json.loads((RAW / name).read_text())["rates"] for name in ("rates.json", "links.json"))
    eight = json.loads((RAW_FP8 / "rates.json").read_text())["rates"]
    for name in CLASSES:
        points = (eight if name.startswith(FP8) else one)[name]
        expected = [(round(kind), size, pytest.approx(share, rel=5e-3)) for kind, size, share in points]
        assert list(getattr(NVIDIA, name)) == expected, name
    assert NVIDIA.fp8_quantise == pytest.approx(eight["fp8_quantise"], rel=5e-3)
    for name in ("hbm", "segment_us"):
        assert getattr(NVIDIA, name) == pytest.approx((one[name] + two[name]) / 2, rel=5e-3)
    assert (NVIDIA.node, NVIDIA.host_us) == pytest.approx((two["node"], one["host_us"]), rel=1e-2)


@pytest.mark.parametrize("folder", [RAW, pytest.param(RAW / "again", marks=pytest.mark.slow)])
def test_raw_rows_of_runs_are_projected_as_near_without_a_file(folder):
    files = [json.loads((folder / f"{name}.json").read_text()) for name in ("one_gpu", "two_gpus")]
    rows = [row for file in files for row in file["rows"]]
    assert len(rows) == 16
    for row in rows:
        run = compose_config(*row["overrides"], "moe.balance=none")  # the default when these ran
        places, step = projected_run(run, H200, None, row["ranks"])
        gib = max(map(allocated_bytes, places)) / 2**30
        assert gib == pytest.approx(row["measured_gib"], rel=0.05) or row["case"] == "small_none", row["case"]
        assert step["step_time_s"] * 1e3 == pytest.approx(row["measured_ms"], rel=0.10), row["case"]


def test_the_table_of_products_in_8_bits_has_what_is_projected_beside_the_raw_runs():
    tokens, runs = 16 * 4096, dict[tuple[int, tuple[str, ...]], list[dict[str, float]]]()
    for ranks, name in ((1, "steps.json"), (2, "two_gpus.json")):
        for run in json.loads((RAW_FP8 / name).read_text()):
            words = tuple(run["command"].partition("graphmoe.train ")[2].split())
            if words[-1] != ("precision.fp8=rowwise", "moe.dispatch_dtype=bf16")[ranks - 1]:
                runs.setdefault((ranks, words), []).append(run)
    rows = rows_below(ROOT / "docs/projection.md", "| `deepseek_v2_lite` | projected")
    for row, ((ranks, words), measured) in zip(rows, runs.items(), strict=True):
        words = *words, "run.device=cuda", "moe.balance=none"  # the default when these ran
        places, step = projected_run(compose_config(*words), H200, None, ranks)
        gib, seconds = max(map(allocated_bytes, places)) / 2**30, step["step_time_s"]
        times = [seconds, *(run["median_step_ms"] / 1e3 for run in measured)]
        rates = [f"{round(tokens / time, -2):,.0f}" for time in times]
        peak = f"{measured[0]['peak_memory_gib']:.1f}"
        assert row[1:] == [f"{gib:.1f}", peak, rates[0], " and ".join(dict.fromkeys(rates[1:]))]
        assert seconds * 1e3 == pytest.approx(measured[0]["median_step_ms"], rel=0.10)


def test_a_report_says_where_its_rates_are_from():
    for found, words in (
        (document("mi355x"), "assumed rates"),
        (document("h200"), "rates measured on H200s; network and overlap are assumed"),
        (document("h100"), "rates measured on H200s, and assumed to hold for H100; network"),
        (document("mi300x", rates=RAW / "rates.json"), "the rates of "),
    ):
        assert found["rates_from"].startswith(words)
        assert f"projected from {words}" in text_of(render(found))


def test_a_report_names_its_precision_and_where_rates_of_8_bits_are_from(tmp_path):
    words = "compile.enabled=true", "precision.fp8=rowwise", "precision.fp8_products=[experts,attn]"
    found = document("h100", *words)
    shown = " ".join(text_of(render(found)).split())
    assert "bf16, products of experts, attn in 8 bits (precision.fp8=rowwise), of which" in shown
    plain = render(document("h100", *words, "precision.fp8_measure=none"))
    assert "(precision.fp8=rowwise)" in text_of(plain) and "may leave some" in shown
    assert "may leave some" not in " ".join(text_of(plain).split())
    assert "MFU" in shown and "of the peak in bf16" in shown
    assert found["rates_from"].endswith("those of fp8 GEMMs are of one H200")
    assert "no products in 8 bits (precision.fp8=none)" in text_of(render(document("h100")))
    assert document("mi300x", *words)["rates_from"].endswith("fp8 GEMMs are assumed")
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"fp8_dense": 0.4}))
    some = document("h200", *words, rates=path)
    assert "those of fp8 GEMMs that it lacks" in some["rates_from"]
    path.write_text(json.dumps({name: getattr(NVIDIA, name) for name in FP8_RATES}))
    assert document("h200", *words, rates=path)["rates_from"] == f"the rates of {path}"
    for rates in (None, path):
        found = document("h200", words[0], "precision.fp8=tensorwise", rates=rates)
        assert found["rates_from"].endswith("; tensorwise is assumed to have those of rowwise")


def test_a_recipe_of_8_bits_that_is_not_known_is_refused():
    run = config(*MODEL, *EIGHT, "compile.enabled=true")
    run.precision.fp8 = Fp8Recipe.blockwise
    with pytest.raises(ConfigError, match="rates of precision.fp8=blockwise are not known here; use none or"):
        project(completed(run, ProjectArgs("h200")), ProjectArgs("h200"))


def test_a_file_of_measured_rates_takes_the_place_of_the_tools_own_and_a_wrong_one_is_refused(tmp_path):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"dense": 0.4, "segment_us": 0}))
    assert rates_of(H200, path) == replace(NVIDIA, dense=0.4, segment_us=0)
    assert document("h200", rates=path)["rates"]["dense"] == 0.4
    for text, message in {
        "{": "is not JSON",
        "[]": "must hold an object",
        '{"dens": 1}': "'dens' is not a rate; did you mean 'dense'",
        '{"dense": 2}': "dense: expected float <= 1.0",
        '{"hbm": 0}': "hbm: expected float > 0.0",
        '{"host_us": NaN}': "host_us: expected float >= 0.0",
        '{"head": [[1, 2]]}': "head.*: expected array of length 3, found 2",
        '{"hbm": [[1, 2, 0.5]]}': "hbm: expected float, found array",
    }.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            rates_of(H200, path)


def test_a_step_is_no_shorter_than_the_host_needs_for_its_starts():
    none = document("h200", "graph.scope=none")
    whole = document("h200", "graph.scope=full_iteration")
    assert none["step_time_s"] == none["time_s"]["host"] > whole["step_time_s"]
    assert whole["time_s"]["host"] == 0


def test_what_leaves_the_node_takes_the_network():
    speeds = Speeds(MI300X, NVIDIA)
    assert speeds.exchange(1e9, 1) == 0
    assert speeds.exchange(1e9, 8) == pytest.approx(1e9 * 7 / 8 / (448e9 * NVIDIA.node))
    assert speeds.exchange(1e9, 16) == pytest.approx(1e9 * 8 / 16 / (50e9 * NVIDIA.network))
    assert speeds.exchange(1e9, 4, stride=8) == pytest.approx(1e9 * 3 / 4 / (50e9 * NVIDIA.network))
