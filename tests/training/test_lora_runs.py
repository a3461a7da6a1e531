"""Runs with LoRA: what stays frozen and is not computed, resuming, starts from other weights, estimates."""

from dataclasses import replace

import pytest
import torch

from graphmoe.command.hydra import compose_config
from graphmoe.config.choices import LORA_TARGETS
from graphmoe.config.schema import ConfigError
from graphmoe.info import describe
from graphmoe.model.build import build_model
from graphmoe.model.lora import ADAPTER
from graphmoe.model.sizes import count_parameters, flops_per_token, forward_flops, state_bytes
from graphmoe.plan.layout import ALONE
from graphmoe.plan.plan import plan_of
from graphmoe.training.dry_run import dry_run
from graphmoe.training.memory import memory_of_places
from tests.checkpoint.test_peft import run_in
from tests.runs import COMPILED, TINY, assert_half_becomes_the_whole, config, metrics, train_in, trainer_in

ALL = f"model.lora_targets=[{','.join(LORA_TARGETS)}]"
ADAPTED = ("model.lora_rank=3", ALL)
BF16 = "precision.compute=bf16"


@pytest.mark.parametrize("words", [(BF16,), ()], ids=["bf16", "fp32"])
def test_frozen_weights_stay_bitwise_and_a_resumed_run_is_the_whole_one(tmp_path, words):
    words = (*TINY, *ADAPTED, *words)
    before = build_model(config(*words).model, dtype=plan_of(config(*words), 1).dtype).state_dict()
    trainer = train_in(tmp_path / "whole", *words)
    for name, weight in trainer.model.state_dict().items():
        assert weight.equal(before[name]) == (ADAPTER not in name and "selection_bias" not in name) or not (
            weight.any() or before[name].any()
        ), name
    optimizer = trainer.optimizer
    held = {name for family in optimizer.families for name in family.names}
    assert held == {name for name in before if ADAPTER in name}
    state = optimizer.state_dict()
    assert {*state["exp_avg"]} == held and ({*state["main"]} == held if BF16 in words else not state["main"])
    assert all(not p.requires_grad and p.grad is None for p in optimizer.frozen.values())
    assert_half_becomes_the_whole(tmp_path, *words)


def graphs_of(trainer):
    for code, _ in trainer.execution.compiled._codes.values():
        if code.graphs.backward is not None:
            yield code.graphs


@pytest.mark.parametrize("targets", [[*LORA_TARGETS], ["attention"]], ids=["all", "attention"])
def test_no_compiled_backward_has_a_wgrad_of_a_frozen_weight(tmp_path, as_traced, targets):
    words = (*TINY, *COMPILED, "model.lora_rank=3", f"model.lora_targets=[{','.join(targets)}]")
    eager = train_in(tmp_path / "eager", *words, "compile.enabled=false")
    trainer = train_in(tmp_path / "compiled", *words)
    rows = [
        [row["loss"] for row in metrics(tmp_path / name) if "loss" in row] for name in ("eager", "compiled")
    ]
    assert rows[1] == pytest.approx(rows[0], rel=1e-5)
    wanted = eager.model.state_dict()
    for name, weight in trainer.model.state_dict().items():
        torch.testing.assert_close(weight, wanted[name], rtol=2e-3, atol=2e-5)
    calls, shapes = [], []
    for graphs in graphs_of(trainer):
        for half in graphs.modules():
            calls += [node for node in half.graph.nodes if node.op == "call_function"]
        for node in graphs.backward.weights.graph.output_node().args[0]:
            shapes.append(tuple(node.meta["val"].shape))
    assert shapes and all(3 in shape[-2:] for shape in shapes), "a gradient of another matrix"
    names = [str(node.target) for node in calls]
    assert not any("mlp_wgrad" in name for name in names)
    grouped = [node for node, name in zip(calls, names, strict=True) if "grouped_mm_wgrad" in name]
    assert all(3 in node.meta["val"].shape[1:] for node in grouped) and bool(grouped) == (len(targets) == 4)
    fused = any("graphmoe.grouped_mlp.default" in name for name in names)
    assert fused == ("experts" not in targets)
    (head,) = {
        node.args[4] for node, name in zip(calls, names, strict=True) if "linear_cross_entropy" in name
    }
    assert head is False, "the gradient of the head"


def test_a_run_starts_from_a_run_without_adapters_and_refuses_other_ones(tmp_path):
    run_in(tmp_path / "base", *TINY, BF16)
    start = f"checkpoint.init_from={tmp_path / 'base'}"
    trainer = trainer_in(tmp_path / "adapted", *TINY, BF16, *ADAPTED, start)
    main = trainer_in(tmp_path / "plain", *TINY, BF16, start).model.state_dict()
    found = trainer.model.state_dict()
    assert all(found[name].equal(weight) for name, weight in main.items())
    assert all(not found[name].any() for name in found if "lora_B" in name)
    run_in(tmp_path / "lora", *TINY, BF16, *ADAPTED)
    start = f"checkpoint.init_from={tmp_path / 'lora'}"
    again = trainer_in(tmp_path / "again", *TINY, BF16, *ADAPTED, start).model.state_dict()
    stored = trainer_in(tmp_path / "lora", *TINY, BF16, *ADAPTED).model.state_dict()
    assert all(again[name].equal(stored[name]) for name in again if "selection_bias" not in name)
    assert any(again[name].any() for name in again if "lora_B" in name)
    for words in ((), ("model.lora_rank=2", ALL), (*ADAPTED, "model.lora_alpha=3")):
        with pytest.raises(ConfigError, match="has adapters of model.lora_rank=3 lora_alpha=16"):
            trainer_in(tmp_path / "-".join(("no", *words))[:30].replace("/", ""), *TINY, BF16, *words, start)


REFUSED = {
    "optim.name=muon updates whole matrices": ("optim.name=muon",),
    "precision.fp8=rowwise quantizes weights": ("precision.fp8=rowwise", BF16),
    "parallel.dp_shard=fsdp2 shards": ("parallel.dp_shard=fsdp2", "launch.nproc=2"),
    "parallel.etp=2 splits experts": ("parallel.etp=2", "launch.nproc=2"),
    "parallel.cp=2 computes keys": ("parallel.cp=2", "launch.nproc=2"),
    "moe.balance=replicas computes experts": (
        "moe.balance=replicas", "moe.dispatcher=symm", "parallel.ep=2", "launch.nproc=2",
    ),
    "model.lora_targets=[heads] has heads; use names out of attention": ("model.lora_targets=[heads]",),
    "model.lora_targets=[] names no matrix": ("model.lora_targets=[]",),
    "model.lora_rank=-1 must be 0 or greater": ("model.lora_rank=-1",),
    "leaves rank 1 of the pipeline (L) nothing to train": (
        "parallel.pp=2", "launch.nproc=2", "launch.nodes=1", "pipeline.layout=Ett|L",
    ),
}  # fmt: skip


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_run_with_frozen_weights_is_refused_by_one_line(line):
    with pytest.raises(ConfigError) as refused:
        config(*TINY, *ADAPTED, *REFUSED[line])
    assert str(refused.value).count(line) == 1, refused.value


def test_estimates_count_what_trains_apart_from_what_is_frozen(tmp_path):
    words = (
        "model=qwen3_0_6b", "data=synthetic", "launch.fake_world=2", "model.num_layers=2",
        "train.micro_batch_size=1", "model.lora_rank=8",
    )  # fmt: skip
    run = compose_config(*words)
    plan, document = plan_of(run, 2), dry_run(run)
    wanted = state_bytes(run.model, plan.layout, bucket_mb=run.optim.bucket_mb)
    assert sorted(document["memory"]["state_bytes"].values()) == sorted(filter(None, wanted.values()))
    counted = count_parameters(run.model)["total"]
    frozen, trained = counted["full"] - counted["adapters"], counted["adapters"]
    assert 0 < trained < frozen / 50 and wanted["grads"] < 8 * trained and wanted["moments"] < 8 * trained
    assert wanted["params"] == pytest.approx(2 * frozen, rel=0.05)
    (place,) = memory_of_places(plan, on_nvidia=True)
    peak = document["memory"]["peak_bytes"]
    assert peak == pytest.approx(place.total - place.buffers["communication"], rel=0.02)
    plain = replace(run.model, lora_rank=0)
    of_weights = sum(n for name, n in forward_flops(plain, 512).items() if name != "attention_scores")
    assert flops_per_token(run.model, 512) == flops_per_token(plain, 512) - of_weights + 6 * trained
    flops = describe(plan)["flops_per_token"]
    assert flops["total"] == sum(flops["step_components"].values()) == flops["forward"] + flops["backward"]
    experts = config(*TINY, *ADAPTED).model
    active = count_parameters(experts)["active"]["adapters"]
    assert (
        forward_flops(experts, 8)["adapters"]
        == 2 * active
        < 2 * count_parameters(experts)["total"]["adapters"]
    )
    trainer = trainer_in(tmp_path, *TINY, *ADAPTED, BF16)
    held = state_bytes(experts, ALONE, bucket_mb=trainer.plan.optim.bucket_mb)
    (family,) = trainer.optimizer.families
    assert held["grads"] == family.grad.nbytes and held["main_params"] == family.main.nbytes
    assert held["params"] == family.weight.nbytes + sum(w.nbytes for w in trainer.optimizer.frozen.values())
