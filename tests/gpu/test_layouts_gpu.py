"""GPUs in every layout, compiled and captured as far as each goes: the losses of one GPU, and the same bits.

Gradients are compared in runs of one step, whose tokens cannot choose other experts by a rounding. Two ranks
share the GPU where there is one, with the dispatcher symm; whole steps are captured where each has its own.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphmoe.ops import collectives as ops
from graphmoe.plan.layout import Layout
from graphmoe.runtime.ranks import Mesh, Ranks
from tests.distributed.layouts import Case, all_on_two_experts, gradient_errors
from tests.distributed.ranks import Job, share_gpus
from tests.distributed.test_context_parallel import Ring
from tests.distributed.training import Outcome, Training
from tests.gpu.sleeping import Replayed, captured
from tests.gpu.tiny import GPU
from tests.tolerances import assert_forward_close, assert_gradient_close, relative_error

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SHARED = "two", "of_symm", "of_fp8", "steps"
RANKS = 4 if torch.cuda.device_count() >= 4 else 2
EAGER, COMPILED = "compile.enabled=false", "compile.enabled=true"
BASE = (
    *GPU, "model.num_layers=2", "train.steps=8", "train.val_interval=4", "train.log_interval=4",
    "train.global_batch_size=8", "optim.schedule=constant", "precision.deterministic=true",
)  # fmt: skip
FULL, LAYER = "graph.scope=full_iteration", "graph.scope=layer"
TP, EP, CP = ((COMPILED, f"parallel.{axis}=2") for axis in ("tp", "ep", "cp"))
EP = (*EP, "moe.dispatcher=alltoall")
RING = (*CP, "parallel.cp_method=ring")
TWO = {
    "eager": (EAGER,),
    "eager full_iteration": (EAGER, FULL),
    "compiled": (COMPILED,),
    "compiled full_iteration": (COMPILED, FULL),
    "compiled layer": (COMPILED, LAYER),
    "tp": TP,
    "tp layer": (*TP, LAYER),
    "tp full_iteration": (*TP, FULL),
    "ep": EP,
    "ep segments": (*EP, "graph.scope=[attn,mlp,moe_router,moe_preprocess,shared_experts]"),
    "cp": CP,
    "cp full_iteration": (*CP, FULL),
    "ring": RING,
    "ring layer": (*RING, LAYER),
    "ring full_iteration": (*RING, FULL),
}
COMMON = (
    COMPILED, f"parallel.ep={RANKS}", "train.steps=5", "train.global_batch_size=16",
    "train.micro_batch_size=1", "graph.warmup_steps=2",
)  # fmt: skip
SYMM = (*COMMON, "moe.dispatcher=symm", "moe.balance=none", "moe.receive_budget=worst_case")
# `partial` would cut the dense layer's unit in two, whose results in bf16 are rounded in between
ROUTER = "graph.scope=[attn,mlp,moe_router,moe_preprocess]"
COPIES, TURNS = (*SYMM, "moe.transport=copy_engine"), "pipeline.ep_overlap=true"
REPLICAS = (*COMMON, "moe.dispatcher=symm", "moe.balance=replicas", "moe.transport=pull")
REPLICAS_COPIED = (*REPLICAS[:-1], "moe.transport=copy_engine")
OF_SYMM = {
    "alltoall": (*COMMON, "moe.dispatcher=alltoall"),
    "symm": SYMM,
    "symm layer": (*SYMM, LAYER),
    "symm dispatch": (*SYMM, "graph.scope=[moe_dispatch]"),
    "symm combine": (*SYMM, "graph.scope=[moe_combine]"),
    "symm experts": (*SYMM, "graph.scope=[shared_experts,moe_experts]"),
    "symm router": (*SYMM, ROUTER),
    "symm full_iteration": (*SYMM, FULL),
    "symm overlap": (*SYMM, "moe.transport=pull", TURNS),
    "symm overlap full_iteration": (*SYMM, "moe.transport=pull", TURNS, FULL),
    "symm overlap router": (*SYMM, "moe.transport=pull", TURNS, ROUTER),
    "symm overlap experts": (*SYMM, "moe.transport=pull", TURNS, "graph.scope=[shared_experts,moe_experts]"),
    "copies": COPIES,
    "copies overlap": (*COPIES, TURNS),
    "copies overlap router": (*COPIES, TURNS, ROUTER),
    "copies full_iteration": (*COPIES, FULL),
    "copies overlap full_iteration": (*SYMM, TURNS, FULL),
    "replicas": REPLICAS,
    "replicas layer": (*REPLICAS, LAYER),
    "replicas full_iteration": (*REPLICAS, FULL),
    "replicas overlap": (*REPLICAS, TURNS),
    "replicas overlap router": (*REPLICAS, TURNS, ROUTER),
    "replicas overlap experts": (*REPLICAS, TURNS, "graph.scope=[shared_experts,moe_experts]"),
    "replicas overlap full_iteration": (*REPLICAS, TURNS, FULL),
    "replicas_copied": REPLICAS_COPIED,
    "replicas_copied overlap full_iteration": (*REPLICAS_COPIED, TURNS, FULL),
}
OF_SYMM = {n: words for n, words in OF_SYMM.items() if not (share_gpus(RANKS) and FULL in words)}
# Times would choose other products in the run whose dispatch_dtype=fp8 keeps the experts in 8 bits.
FP8 = (*SYMM, "precision.fp8=rowwise", "precision.fp8_measure=none")
OF_FP8 = {
    f"{name}: {kind}": (*FP8, f"moe.transport={name.split()[0]}", *words, f"moe.dispatch_dtype={kind}")
    for name, words in {
        "pull": (), "copy_engine": (), "pull dispatch": ("graph.scope=[moe_dispatch,moe_combine]",),
        "pull full_iteration": (FULL,), "copy_engine overlap": (TURNS,),
        "copy_engine overlap full_iteration": (TURNS, FULL),
    }.items()
    for kind in ("bf16", "fp8")
    if not (share_gpus(RANKS) and FULL in words) and (kind == "fp8" or not words)
}  # fmt: skip
"""Trainings in 8 bits, whose tokens are dispatched in either dtype."""
RINGS = {
    f"ring {heads} {sizes}": Ring(
        Layout(cp=2, ring=True), heads, sizes, torch.bfloat16, seq_len=512, device="cuda"
    )
    for heads, sizes in (((8, 2), (64, 64)), ((4, 4), (192, 128)))
}
BF16 = (*GPU, "train.steps=1", "train.clip_grad_norm=0", "model.context_length=64")
DENSE = (*BF16, "precision.compute=fp32", "model.num_dense_layers=3")
MLA = (*DENSE, "model.q_lora_rank=32")
GQA = (*DENSE, "model.attention=gqa", "model.head_dim=32", "model.num_kv_heads=2", "model.qk_norm=true")
EXACT = {
    f"{layout}, {name}": Case(2, layout, model=model)
    for layout in ("tp=2", "cp=2", "cp=2 cp_method=ring")
    for name, model in {"mla": MLA, "gqa": GQA}.items()
    if (layout, name) != ("tp=2", "gqa")
}
STAGES = (*DENSE, "model.num_dense_layers=4", "model.tie_embeddings=true")
EXACT |= {schedule: Case(2, "pp=2", schedule, model=STAGES) for schedule in ("interleaved", "zb1p", "zbv")}
BALANCED = (*BF16, "moe.force_balance=true")
ROUNDED = {
    **{f"{layout}, balanced": Case(2, layout, model=BALANCED) for layout in ("ep=2", "etp=2")},
    **{
        f"{layout}, {mode}": Case(2, layout, model=BF16, mode=mode, change=all_on_two_experts)
        for layout in ("ep=2", "etp=2")
        for mode in ("eager", "inductor")
    },
}


def all_collectives(ranks: Ranks, folder: Path) -> Replayed:
    ops.use_groups(Mesh(Layout(tp=2)))
    x = torch.empty(2, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def change(seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(2 * seed + ranks.rank)
        with torch.no_grad():
            x.normal_(generator=generator)

    def run() -> list[Tensor]:
        results = [ops.all_gather(x, "tp", 2, dim) for dim in (0, 1)]
        results += [ops.reduce_scatter(x, "tp", 2, dim) for dim in (0, 1)]
        results += [ops.all_to_all(x, "tp", 2, split=2, join=1), ops.all_to_all(x, "tp", 2, split=1, join=2)]
        results += [ops.all_reduce(x, "tp", 2), ops.all_reduce(x, "tp", 2, "max"), ops.index_along("tp", x)]
        loss = sum((y.float() ** 2).sum() for y in results if y.requires_grad)
        return [*(y.detach() for y in results), *torch.autograd.grad(loss, x)]

    change(0)
    return captured(run, change)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> dict[str, list[Outcome]]:
    cases = {name: Training((*BASE, *words)) for name, words in TWO.items()}
    return Job(tmp_path_factory.mktemp("ranks"), cases, device="cuda").results(seconds=600)


@pytest.fixture(scope="module")
def of_symm(tmp_path_factory) -> dict[str, list[Outcome]]:
    cases = {name: Training((*BASE, *words)) for name, words in OF_SYMM.items()}
    return Job(tmp_path_factory.mktemp("ranks"), cases, RANKS, device="cuda").results(seconds=580)


@pytest.fixture(scope="module")
def of_fp8(tmp_path_factory) -> dict[str, list[Outcome]]:
    cases = {name: Training((*BASE, *words)) for name, words in OF_FP8.items()}
    return Job(tmp_path_factory.mktemp("ranks"), cases, RANKS, device="cuda").results(seconds=580)


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> dict[str, list[Any]]:
    cases = {**RINGS, "collectives": all_collectives}
    cases |= {name: case.training for name, case in (EXACT | ROUNDED).items()}
    return Job(tmp_path_factory.mktemp("ranks"), cases, device="cuda").results(seconds=500)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Outcome:
    return Training((*BASE, EAGER))(Ranks(), tmp_path_factory.mktemp("alone"))


def assert_same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []


def assert_losses_close(found: list[Outcome], wanted: Outcome) -> None:
    """Losses are those of another run, and both ranks keep the same row of each step."""
    losses = [[row["loss"] for row in run.written if "loss" in row] for run in (found[0], wanted)]
    one, other = map(torch.tensor, losses)
    assert_forward_close(one.bfloat16(), other)  # products in bf16
    assert torch.equal(found[0].rows, found[1].rows)


def assert_bitwise(outcomes: dict[str, list[Outcome]], name: str) -> None:
    for found, plain in zip(outcomes[name], outcomes[name.split()[0]], strict=True):
        assert (found.rows != plain.rows).nonzero().tolist() == []  # step, place in a row
        assert_same_tensors(found.weights, plain.weights)


@two_gpus
@pytest.mark.parametrize("name", TWO)
def test_losses_are_those_of_one_gpu_on_the_same_global_batches(two, alone, name):
    assert_losses_close(two[name], alone)
    if "parallel" not in " ".join(TWO[name]):
        first, second = two[name]
        assert_same_tensors(first.weights, second.weights)
        assert_same_tensors(first.gradients, second.gradients)


@two_gpus
@pytest.mark.parametrize("name", [name for name in TWO if " " in name])
def test_captured_steps_are_bitwise_the_uncaptured_ones(two, name):
    assert_bitwise(two, name)


@pytest.mark.parametrize("name", [name for name in OF_SYMM if name != "alltoall"])
def test_losses_with_symm_are_those_of_alltoall(of_symm, name):
    assert_losses_close(of_symm[name], of_symm["alltoall"][0])


@pytest.mark.parametrize("name", [name for name in OF_SYMM if " " in name])
def test_capture_and_overlap_change_no_bit(of_symm, name):
    assert_bitwise(of_symm, name)


@pytest.mark.parametrize("name", [name for name in OF_FP8 if name.endswith("fp8")])
def test_rows_in_8_bits_change_no_bit_of_a_training_in_8_bits(of_fp8, name):
    plain = f"{name.split(':')[0].split()[0]}: bf16"
    for found, wanted in zip(of_fp8[name], of_fp8[plain], strict=True):
        assert (found.rows != wanted.rows).nonzero().tolist() == []
        assert_same_tensors(found.weights, wanted.weights)


@two_gpus
@pytest.mark.parametrize("name", RINGS)
def test_ring_attention_and_its_gradients_are_those_of_the_definition(steps, name):
    out, *gradients = RINGS[name].joined(steps[name])
    of_out, *of_gradients = RINGS[name].expected()
    assert_forward_close(out, of_out)
    for gradient, expected in zip(gradients, of_gradients, strict=True):
        assert_gradient_close(gradient, expected)


@two_gpus
def test_replayed_collectives_give_what_uncaptured_ones_give(steps):
    for outcome in steps["collectives"]:
        assert len(outcome.captured) > 5
        for replayed, plain in zip(outcome.captured, outcome.plain, strict=True):
            assert torch.equal(replayed, plain)


@two_gpus
@pytest.mark.parametrize("name", EXACT)
def test_gradients_are_those_of_one_gpu(steps, tmp_path, name):
    case, found = EXACT[name], steps[name]
    wanted = case.alone(Ranks(), tmp_path)
    assert_forward_close(found[0].rows[:, 0], wanted.rows[:, 0])
    errors = gradient_errors(case, found, wanted)
    assert {each: error for each, error in errors.items() if error > 1e-4} == {}  # other tiles, in fp32


@two_gpus
@pytest.mark.parametrize("name", ROUNDED)
def test_gradients_of_shared_experts_are_as_near_to_fp32_as_those_of_one_gpu(steps, tmp_path, name):
    case, found = ROUNDED[name], steps[name]
    near = case.alone(Ranks(), tmp_path / "near")
    exact = replace(case, model=(*case.model, "precision.compute=fp32")).alone(Ranks(), tmp_path / "exact")
    assert relative_error(found[0].rows[:, 0], exact.rows[:, 0]) < 1e-2
    for each, error in gradient_errors(case, found, exact).items():
        assert error < 2 * relative_error(near.gradients[each], exact.gradients[each]) + 1e-3, each
