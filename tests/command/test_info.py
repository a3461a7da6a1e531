"""The figures that graphmoe.info prints."""

from dataclasses import replace
from typing import Any

import pytest
from omegaconf import OmegaConf

from graphmoe.command.hydra import schema, to_config
from graphmoe.config.schema import ConfigError, LaunchConfig, ParallelConfig, RunConfig
from graphmoe.info import describe, render, smallest_layout, with_some_batch
from graphmoe.pipeline_view.plans import load_preset
from graphmoe.plan.layout import Layout
from graphmoe.plan.pipeline.plan import with_one_micro_batch
from graphmoe.plan.plan import plan_of
from tests.runs import ROOT, TINY, config, text_of
from tests.test_docs import rows_below


def described(preset: str, num_ranks: int = 1, **parallel: int) -> dict[str, Any]:
    run = replace(config(), model=load_preset(preset), parallel=ParallelConfig(**parallel))
    layout = Layout.of(run.parallel, num_ranks)
    return describe(plan_of(with_one_micro_batch(run, layout), num_ranks))


@pytest.mark.parametrize(("preset", "columns"), [("moe_1t", (1, 2)), ("moe_2t", (3, 4))])
def test_the_page_explains_published_counts_of_active_parameters(preset, columns):
    counts, model = described(preset)["parameters"]["active"], load_preset(preset)
    rows = ("routed_experts", "attention", "shared_experts", "embedding head", "router norms")
    ours = [sum(counts[name] for name in row.split()) for row in rows]
    theirs = [ours[0], model.num_layers * model.hidden_size**2, 0, counts["head"], 0]
    rows = rows_below(ROOT / "docs/models.md", "| active parameters, B |")
    for column, parts in zip(columns, (theirs, ours), strict=True):
        shown = [f"{part / 1e9:.2f}" if part else "-" for part in parts]
        assert [row[column] for row in rows] == [*shown, f"{sum(parts) / 1e9:.1f}"]
    assert sum(ours) == counts["full"]


def test_the_text_shows_counts_in_billions_the_format_and_18_bytes_a_parameter():
    document = described("deepseek_v2_lite")
    text = text_of(render(document))
    (row,) = [line for line in text.splitlines() if "without embedding" in line]
    assert {"15.287", "2.242"} < {*row.split()} and "Memory of training in bf16, without" in text
    text = text_of(render(document | {"fp8": "rowwise"}))
    assert "Memory of training in bf16, products in 8 bits (rowwise), with" in text
    memory = document["memory_bytes"]
    assert memory["total"] == 18 * document["parameters"]["total"]["full"] == 9 * memory["weights_bf16"]
    words = ("compile.enabled=true", "precision.fp8=rowwise", "precision.fp8_products=[attn]")
    assert describe(plan_of(config(*words), 1))["fp8"] == "rowwise"


def test_the_memory_of_each_of_several_ranks_is_shown_beside_that_of_one():
    document = described("deepseek_v3", num_ranks=16, ep=16)
    alone, each = document["memory_bytes"], document["memory_bytes_per_rank"]
    assert each["moments_fp32"] == pytest.approx(alone["moments_fp32"] / 16)
    assert each["total"] == sum(size for kind, size in each.items() if kind != "total")
    text = text_of(render(document))
    assert "GiB on each of 16" in text and "of a run of 16 ranks" in text
    assert "on each of" not in text_of(render(described("deepseek_v3")))


@pytest.mark.parametrize(
    ("schedule", "pieces"), [("1f1b", "Ettt|ttt|tt|ttmL"), ("zbv", "Et|t|t|tt|tt|tt|tm|L")]
)
def test_with_a_pipeline_the_ranks_that_hold_most_and_least_are_shown(schedule, pieces):
    run = config(
        "launch.nproc=8", "parallel.pp=4", f"pipeline.schedule={schedule}", "model.num_layers=10",
        f"pipeline.layout={pieces}", "model.hidden_size=128", "model.kv_lora_rank=128",  # no padding
        "model.num_dense_layers=1", "train.global_batch_size=8", "model.mtp_depth=1",
    )  # fmt: skip
    smallest = smallest_layout(run)
    whole = plan_of(with_one_micro_batch(run, smallest), smallest.size("world"))
    plan = whole.pipeline
    document = describe(whole)
    ranks = document["pipeline"]["ranks"]
    totals = [rank["memory_bytes"]["total"] for rank in ranks]
    assert document["memory_bytes_per_rank"]["total"] == max(totals) > min(totals)
    assert "".join(piece for rank in ranks for piece in rank["pieces"]).count("E") == 1
    full = document["parameters"]["total"]["full"]
    twice = (len(plan.embed_on) - 1) * run.model.vocab_size * run.model.hidden_size
    assert twice > 0  # the layer that predicts later tokens embeds them
    sums = {kind: sum(rank["memory_bytes"][kind] for rank in ranks) for kind in ranks[0]["memory_bytes"]}
    assert sums["moments_fp32"] * whole.layout.dp == pytest.approx(8 * full)  # each has one owner
    assert sums["weights_bf16"] == pytest.approx(2 * (full + twice) + 2 * full / whole.layout.dp)
    text = text_of(render(document))
    for word, total in (("most", max(totals)), ("least", min(totals))):
        rank = totals.index(total)
        assert f"{word}: pp rank {rank}, {' '.join(ranks[rank]['pieces'])}" in text


def test_ranks_are_those_of_the_launch():
    for launch, parallel, ranks in [
        (LaunchConfig(nproc=8), ParallelConfig(ep=16), 16),  # launch.nodes=auto: as few as it fits
        (LaunchConfig(nproc=8), ParallelConfig(ep=8), 8),
        (LaunchConfig(nproc=8, nodes=4), ParallelConfig(ep=8), 32),
        (LaunchConfig(nproc=4), ParallelConfig(tp=8, ep=2), 8),
        (LaunchConfig(fake_world=1024), ParallelConfig(ep=64), 1024),
    ]:
        assert smallest_layout(RunConfig(launch=launch, parallel=parallel)).size("world") == ranks


def completed(*words: str) -> RunConfig:
    merged = OmegaConf.merge(schema(), OmegaConf.from_dotlist([*TINY, *words]))
    return to_config(merged, None, with_some_batch)


def test_a_layout_needs_no_batch_that_its_ranks_can_share():
    for words in (
        "launch.nproc=64",
        "launch.nproc=8 launch.nodes=4 parallel.tp=2 train.micro_batch_size=3",
        "launch.nproc=12 parallel.pp=2 pipeline.schedule=zbv",
        "train.micro_batch_size=3",
    ):
        with pytest.raises(ConfigError, match="global_batch_size"):
            config(*words.split())
        run = completed(*words.split())
        layout = smallest_layout(run)
        assert describe(plan_of(with_one_micro_batch(run, layout), layout.size("world")))["parameters"]


def test_wrong_sizes_are_refused_by_name_all_the_same():
    for key in ("train.micro_batch_size", "parallel.ep", "launch.nproc"):
        with pytest.raises(ConfigError, match=key):
            completed(f"{key}=0")
