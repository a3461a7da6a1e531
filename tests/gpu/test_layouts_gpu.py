"""GPUs in every layout, compiled and captured as far as each goes: the losses of one GPU, and the same bits.

Two ranks share the GPU where there is one, with the dispatcher symm; whole steps are captured where each has
its own.
"""

import pytest
import torch
from torch import Tensor

from graphmoe.runtime.ranks import Ranks
from tests.distributed.ranks import Job, share_gpus
from tests.distributed.training import Outcome, Training
from tests.gpu.tiny import GPU
from tests.tolerances import assert_forward_close

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
RANKS = 4 if torch.cuda.device_count() >= 4 else 2
EAGER, COMPILED = "compile.enabled=false", "compile.enabled=true"
BASE = (
    *GPU, "model.num_layers=2", "train.steps=8", "train.val_interval=4", "train.log_interval=4",
    "train.global_batch_size=8", "optim.schedule=constant", "precision.deterministic=true",
)  # fmt: skip
FULL, LAYER = "graph.scope=full_iteration", "graph.scope=layer"
TP, EP, CP = ((COMPILED, f"parallel.{axis}=2") for axis in ("tp", "ep", "cp"))
RING = (*CP, "parallel.cp_method=ring")
TWO = {
    "eager": (EAGER,),
    "eager full_iteration": (EAGER, FULL),
    "compiled": (COMPILED,),
    "compiled full_iteration": (COMPILED, FULL),
    "compiled layer": (COMPILED, LAYER),
    "tp": TP,
    "tp layer": (*TP, LAYER),
    "ep": EP,
    "ep segments": (*EP, "graph.scope=[attn,mlp,moe_router,moe_preprocess,shared_experts]"),
    "cp": CP,
    "cp full_iteration": (*CP, FULL),
    "ring": RING,
    "ring layer": (*RING, LAYER),
}
COMMON = (
    COMPILED, f"parallel.ep={RANKS}", "train.steps=5", "train.global_batch_size=16",
    "train.micro_batch_size=1", "graph.warmup_steps=2",
)  # fmt: skip
SYMM = (*COMMON, "moe.dispatcher=symm", "moe.receive_budget=worst_case")
COPIES, TURNS = (*SYMM, "moe.transport=copy_engine"), "pipeline.ep_overlap=true"
OF_SYMM = {
    "alltoall": COMMON,
    "symm": SYMM,
    "symm layer": (*SYMM, LAYER),
    "symm dispatch": (*SYMM, "graph.scope=[moe_dispatch]"),
    "symm combine": (*SYMM, "graph.scope=[moe_combine]"),
    "symm experts": (*SYMM, "graph.scope=[shared_experts,moe_experts]"),
    # `partial` would cut the dense layer's unit in two, whose results in bf16 are rounded in between
    "symm router": (*SYMM, "graph.scope=[attn,mlp,moe_router,moe_preprocess]"),
    "symm full_iteration": (*SYMM, FULL),
    "symm overlap": (*SYMM, "moe.transport=pull", TURNS),
    "symm overlap full_iteration": (*SYMM, "moe.transport=pull", TURNS, FULL),
    "copies": COPIES,
    "copies overlap": (*COPIES, TURNS),
    "copies full_iteration": (*COPIES, FULL),
    "copies overlap full_iteration": (*SYMM, TURNS, FULL),
}
OF_SYMM = {n: words for n, words in OF_SYMM.items() if not (share_gpus(RANKS) and FULL in words)}


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> dict[str, list[Outcome]]:
    """The outcomes of two ranks; that they end at all shows that captured collectives let them."""
    cases = {name: Training((*BASE, *words)) for name, words in TWO.items()}
    return Job(tmp_path_factory.mktemp("ranks"), cases, device="cuda").results(seconds=600)


@pytest.fixture(scope="module")
def of_symm(tmp_path_factory) -> dict[str, list[Outcome]]:
    cases = {name: Training((*BASE, *words)) for name, words in OF_SYMM.items()}
    return Job(tmp_path_factory.mktemp("ranks"), cases, RANKS, device="cuda").results(seconds=580)


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
