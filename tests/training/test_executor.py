"""Refusals, choices and log lines of a run about its experts before the first step."""

from contextlib import nullcontext

import pytest
import torch

from graphmoe.config.schema import ConfigError
from graphmoe.plan.layout import Layout
from graphmoe.plan.plan import plan_of
from graphmoe.training import executor as execution
from graphmoe.training.executor import chosen_experts, mlp_shape, refuse_waiting_experts
from tests.runs import config

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
COMPILED, STAGE_3 = "compile.enabled=true", "moe.sync_free_stage=3"
PASS = "compile.enabled=true with the pass fuse_experts"


@pytest.mark.parametrize(
    ("words", "fuses", "needed"),
    [
        (("moe.sync_free_stage=2",), False, PASS),
        ((STAGE_3,), False, PASS),
        ((COMPILED, STAGE_3, "moe.experts=torch"), True, "moe.experts=auto"),
        ((STAGE_3, "moe.experts=torch"), False, f"{PASS} and moe.experts=auto"),
        # fused experts, lower stages and dense models do not wait
        ((COMPILED, "graph.scope=layer"), True, ""),
        ((COMPILED, "graph.scope=moe"), True, ""),
        ((COMPILED, "graph.scope=[moe_experts]"), True, ""),
        ((COMPILED, STAGE_3, "moe.experts=triton"), True, ""),
        (("moe.sync_free_stage=1",), False, ""),
        ((COMPILED, "moe.experts=torch"), True, ""),
        ((COMPILED, "graph.scope=partial"), True, ""),
        ((STAGE_3, "model.num_dense_layers=2"), False, ""),
    ],
    ids=str,
)
def test_experts_that_wait_for_the_host_break_the_promise_of_a_stage(monkeypatch, words, fuses, needed):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))  # Hopper
    plans = {dtype: plan_of(config(*words, f"precision.compute={dtype}"), 1) for dtype in ("bf16", "fp32")}
    refuse_waiting_experts(plans["bf16"], GPU, fuses=fuses)
    refuse_waiting_experts(plans["fp32"], CPU, fuses=fuses)
    with pytest.raises(ConfigError) if needed else nullcontext() as caught:
        refuse_waiting_experts(plans["fp32"], GPU, fuses=fuses)
    if needed:
        stage = plans["fp32"].config.moe.sync_free_stage
        assert str(caught.value).startswith(f"moe.sync_free_stage={stage} (graph.scope=")
        ways = f"use {needed}, precision.compute=bf16, or moe.sync_free_stage=auto"
        assert str(caught.value).endswith(f"torch.float32 on this device; {ways}")


@pytest.mark.parametrize(
    "words, auto, torchs",
    [
        (("graph.scope=none",), False, False),
        (("graph.scope=partial",), False, False),
        (("moe.sync_free_stage=2",), True, True),
        (("graph.scope=layer",), True, True),
        (("graph.scope=full_iteration",), True, True),
    ],
    ids=str,
)
def test_backends_that_wait_are_left_out_where_the_stage_forbids_them(monkeypatch, words, auto, torchs):
    asked = []

    def choose(requested, *rest, sync_free):
        asked.append((requested, sync_free))
        return requested

    monkeypatch.setattr(execution, "choose_backends", choose)
    for remembered, requested in (("torch,torch,torch", "auto"), ("", "auto"), ("", "torch")):
        run = config(*words, COMPILED, f"moe.experts={requested}")
        assert chosen_experts(plan_of(run, 1), CPU, None, remembered) == (remembered or requested)
    # auto takes only those that never wait, whatever the stage; a checkpoint's and named ones may at 0 and 1
    assert asked == [("torch,torch,torch", auto), ("auto", True), ("torch", torchs)]


@pytest.mark.parametrize(
    "layout, tokens, width, experts, top_k",
    [
        (Layout(dp=4), 32, 8, 4, 2),
        (Layout(dp=4, ep=2), 64, 8, 2, 1),
        (Layout(dp=4, ep=4), 64, 8, 1, 1),
        (Layout(dp=4, etp=2), 64, 4, 4, 2),
        (Layout(dp=2, tp=2, ep=2, etp=2), 64, 4, 2, 1),
    ],
    ids=str,
)
def test_kernels_are_measured_for_the_experts_of_a_rank(layout, tokens, width, experts, top_k):
    sizes = [f"parallel.{name}={getattr(layout, name)}" for name in ("tp", "ep", "etp")]
    words = ("model.top_k=2", "train.micro_batch_size=2", "data.seq_len=16", "train.global_batch_size=8")
    shape = mlp_shape(plan_of(config(*words, *sizes), layout.dp * layout.tp))
    assert (tokens, width, experts, top_k) == (shape.T, shape.F, shape.E, shape.K)
    # of all ranks together, a row for each slot of each token on each of the etp ranks of its expert
    assert shape.T * shape.K * layout.size("stage") == 32 * 2 * layout.dp * layout.etp
