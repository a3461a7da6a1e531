"""The projected time of a step: what it is made of, and how it answers to rates and schedules."""

import json
from dataclasses import replace
from typing import Any

import pytest

from graphmoe.bench.runs import projected_run
from graphmoe.command.hydra import compose_config
from graphmoe.config.schema import ConfigError, Fp8Recipe, ParallelConfig, RunConfig
from graphmoe.pipeline_view.plans import load_preset
from graphmoe.plan.attention import is_linear
from graphmoe.plan.costs.hardware import CARDS, GB300, H200, MI300X
from graphmoe.plan.costs.rates import CLASSES, FP8, FP8_RATES, Rates, Speeds, default_rates, rates_of
from graphmoe.plan.costs.segment_times import REPLICA_PLAN, REPLICAS
from graphmoe.plan.experts import SLACK
from graphmoe.plan.plan import plan_of
from graphmoe.plan.rules import resolve
from graphmoe.project.arguments import ProjectArgs, completed
from graphmoe.project.document import project
from graphmoe.project.estimates import place_kinds
from graphmoe.project.step_time import short_plan, step_time
from graphmoe.project.tables import render
from graphmoe.runtime.dispatch.nvshmem import MIN_BYTES
from graphmoe.training.memory import allocated_bytes, memory_of_places
from tests.plan.costs.test_activations import HYBRID, MODEL
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


def test_sharded_gradients_are_reduced_in_each_micro_batch():
    words = ("parallel.ep=1", "model.num_layers=6", "optim.bucket_mb=0.01", "train.micro_batch_size=1")
    for card in ("h200", "mi355x"):
        found = {
            (shards, count): document(
                card, *words, f"optim.grad_shard={shards}", f"train.global_batch_size={8 * count}"
            )
            for shards in ("false", "true")
            for count in (1, 5)
        }
        seconds = {key: each["time_s"]["exposed_gradients"] for key, each in found.items()}
        assert seconds["true", 1] == pytest.approx(seconds["false", 1])
        assert seconds["true", 5] > 2 * seconds["false", 5]
        held = {key: each["memory_gb"]["grads"] for key, each in found.items()}
        assert held["true", 5] < 0.8 * held["false", 5]


def test_stages_that_stand_for_others_have_their_delta_nets():
    words = (*HYBRID, "parallel.pp=2", "pipeline.layout=Ettt|tttL", "model.num_dense_layers=0")
    plan = plan_of(config(*MODEL, *EIGHT, *words, "model.num_layers=6", "pipeline.schedule=1f1b"), 8)
    assert plan.pipeline
    stages = [kind.stages[0] for kind in place_kinds(plan.pipeline, plan.model)]
    linear = [[is_linear(plan.model, i) for i in stage.layers] for stage in stages]
    assert linear == [[True, False, True], [False, True, False]]


def test_zero_bubble_schedules_wait_less_than_1f1b():
    words = ("parallel.pp=4", "model.num_layers=8", "train.global_batch_size=64", "compile.enabled=true")
    words += ("graph.scope=full_iteration",)  # or the host is slower than so small a model
    names = ("gpipe", "1f1b", "zb1p")
    gpipe, one_f, zero = (document("h200", *words, f"pipeline.schedule={x}")["bubble"] for x in names)
    assert 0 < zero < one_f == pytest.approx(gpipe, rel=0.05)


@pytest.mark.parametrize(("recipe", "size", "barriers"), [("none", 2, (0, 0, 1)), ("rowwise", 1, (2, 2, 2))])
def test_replicas_cost_a_plan_barriers_and_traffic_and_even_ranks_out(recipe, size, barriers):
    """Weights are fetched in the forward and again in the backward, and a gradient goes to its owner."""
    words = ("parallel.ep=8", "moe.dispatcher=symm", f"precision.fp8={recipe}", "moe.receive_budget=1.015625")
    even = replace(NVIDIA, load_spread=0.0)
    plain, balanced = (  # both with as much room
        by_segment(even, *words, f"moe.balance={balance}") for balance in ("none", "replicas")
    )
    of_expert, barrier = REPLICAS * Speeds(H200, NVIDIA).pass_on(3 * 128 * 80, in_node=True), 36.6e-6
    first, again, home = (barrier * count for count in barriers)
    # rows beyond the mean, of which the fullest rank has a 64th
    slack = 1 + 1 / SLACK
    for way, more in (
        ("forward", size * of_expert + first),
        ("backward", (size + 4) * of_expert + again + home),
    ):
        before, after = plain[way], balanced[way]
        products = before["moe_experts"] - NVIDIA.segment_us * 1e-6
        assert after["moe_experts"] == pytest.approx(
            before["moe_experts"] + more + products * (slack - 1), rel=1e-3
        )
        planned = REPLICA_PLAN + 2 * barrier if way == "forward" else 0
        assert after["moe_preprocess"] == pytest.approx(before["moe_preprocess"] + planned)
    uneven = by_segment(NVIDIA, *words, "moe.balance=none")
    assert uneven["forward"]["moe_experts"] > balanced["forward"]["moe_experts"] - first - size * of_expert
    shown = [
        text_of(render(document("h200", *words, f"moe.balance={each}"))) for each in ("none", "replicas")
    ]
    assert ["slots for replicas on each rank: 1" in text for text in shown] == [False, True]


def by_segment(rates: Rates, *words: str) -> dict[str, dict[str, float]]:
    run = config(*MODEL, *EIGHT, *words)
    plan = short_plan(completed(run, args := ProjectArgs("h200")), args.num_ranks)
    times = step_time(
        plan, plan.sizes(on_nvidia=True), memory_of_places(plan, on_nvidia=True), Speeds(H200, rates)
    )
    return {way: times["time_s"][f"{way}_by_segment"] for way in ("forward", "backward")}


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
    in_steps = json.loads((RAW / "in_steps.json").read_text())["points"]
    # those of delta nets have raw data of their own: tests/plan/costs/test_layer_times.py
    for name in (each for each in CLASSES if not each.startswith("delta_net")):
        points = (eight if name.startswith(FP8) else one)[name]
        points = sorted([*points, *(share_in_step(each) for each in in_steps if each["rate"] == name)])
        expected = [(round(kind), size, pytest.approx(share, rel=5e-3)) for kind, size, share in points]
        assert list(getattr(NVIDIA, name)) == expected, name
    assert NVIDIA.fp8_quantise == pytest.approx(eight["fp8_quantise"], rel=5e-3)
    for name in ("hbm", "segment_us"):
        assert getattr(NVIDIA, name) == pytest.approx((one[name] + two[name]) / 2, rel=5e-3)
    assert (NVIDIA.node, NVIDIA.host_us) == pytest.approx((two["node"], one["host_us"]), rel=1e-2)


def share_in_step(point: dict[str, Any]) -> list[float]:
    """Return a point of a kernel in a whole step, at the clock of a step that does nothing else."""
    share = point["flops"] / point["ms"] * 1e3 / (H200.tflops * (1 + point["rate"].startswith(FP8)) * 1e12)
    return [point["kind"], point["size"], share * (1 + NVIDIA.power_cap * point["gemm_share"])]


@pytest.mark.parametrize("folder", [RAW, pytest.param(RAW / "again", marks=pytest.mark.slow)])
def test_raw_rows_of_runs_are_projected_as_near_without_a_file(folder):
    files = [json.loads((folder / f"{name}.json").read_text()) for name in ("one_gpu", "two_gpus")]
    rows = [row for file in files for row in file["rows"]]
    assert len(rows) == 15
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
        (document("mi355x"), "rates fitted to 24 published points"),
        (document("mi450"), "rates fitted to 24 published points; MI450 is only announced"),
        (document("h200"), "rates measured on H200s; links between nodes are assumed"),
        (document("gb300"), "rates measured on H200s, and assumed to hold for GB300; links"),
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


def test_a_rack_has_nodes_of_four_whose_ranks_fast_links_join():
    words = ("parallel.ep=16", "model.num_experts=16", "launch.nproc=4", "moe.dispatcher=alltoall")
    rack, cluster = (document(card, *words, nodes=4) for card in ("gb200", "b200"))
    assert (rack["nodes"], rack["num_ranks"], rack["layout"]["ep"]) == (4, 16, 16)
    assert rack["time_s"]["exposed_exchange"] < cluster["time_s"]["exposed_exchange"]
    assert (
        ProjectArgs("gb300", nodes=18).num_ranks == 72 and ProjectArgs("h200", gpus_per_node=3).num_ranks == 3
    )


def test_what_a_dispatcher_shares_with_peers_is_memory():
    words = ("parallel.ep=8", "moe.balance=none", "compile.enabled=true", "model.hidden_size=256")
    sizes = {
        name: document("h200", *words, f"moe.dispatcher={name}")["buffers_gb"].get("dispatch", 0)
        for name in ("alltoall", "symm", "nvshmem", "deepep")
    }
    assert sizes["alltoall"] == 0 < sizes["symm"] and sizes["nvshmem"] >= 2 * MIN_BYTES / 1e9
    # ten channels, each with 256 rows of 256 bf16 numbers and 2 KiB for each of eight ranks
    assert sizes["deepep"] == pytest.approx(10 * 8 * 256 * (2 * 256 + 2048) / 1e9)


def test_what_leaves_the_node_takes_the_network():
    speeds = Speeds(MI300X, NVIDIA)
    assert speeds.exchange(1e9, 1) == 0
    assert speeds.exchange(1e9, 8) == pytest.approx(1e9 * 7 / 8 / (448e9 * NVIDIA.node))
    assert speeds.exchange(1e9, 16) == pytest.approx(1e9 * 8 / 16 / (50e9 * NVIDIA.network_alltoall))
    assert speeds.exchange(1e9, 4, stride=8) == pytest.approx(1e9 * 3 / 4 / (50e9 * NVIDIA.network_alltoall))
    assert speeds.gather(1e9, 16) > speeds.gather(1e9, 8) > Speeds(GB300, NVIDIA).gather(1e9, 16)
    assert Speeds(GB300, NVIDIA).exchange(1e9, 64) == pytest.approx(1e9 * 63 / 64 / (900e9 * NVIDIA.node))
