"""Two micro-batches in turns on GPUs: captured exchanges, stages of a pipeline, and DeepEP, bitwise.

Ranks share a GPU if there are fewer than ranks, except with DeepEP.
"""

import pytest
import torch

from graphmoe.config.packages import is_installed
from tests.distributed.ranks import Job, share_gpus
from tests.distributed.training import Outcome, Training
from tests.gpu import test_layouts_gpu as layouts
from tests.gpu.test_layouts_gpu import FULL, LAYER, RANKS, ROUTER, TURNS, assert_bitwise, assert_losses_close

SHARED = "exchanges", "of_deepep", "stages"
PARTIAL, DISPATCH = "graph.scope=partial", "graph.scope=[moe_dispatch]"
EXCHANGES = {
    f"{name}{how}": (*words, *([f"moe.transport={transport}", TURNS] if how else []), *scope)
    for name, words, transport in (
        ("symm", layouts.SYMM, "pull"), ("copies", layouts.COPIES, "copy_engine"),
        ("replicas", layouts.REPLICAS, "pull"),
    )
    for how, scope in {"": (), " overlap layer": (LAYER,), " overlap dispatch": (DISPATCH,)}.items()
}  # fmt: skip
WIDE = (*layouts.COMMON, "model.hidden_size=256")
DEEPEP = (*WIDE, "moe.dispatcher=deepep", "moe.receive_budget=worst_case")
OF_DEEPEP = {"alltoall": WIDE, "deepep": DEEPEP} | {
    f"deepep overlap{how}": (*DEEPEP, TURNS, *scope)
    for how, scope in {"": (), " router": (ROUTER,), " layer": (LAYER,), " full_iteration": (FULL,)}.items()
}
# all layers have experts, or `partial` would cut a dense layer's unit, which rounds in between
EXPERTS = (
    layouts.COMPILED, "model.num_layers=4", "model.num_dense_layers=0", "train.global_batch_size=16",
    "train.micro_batch_size=1", "train.steps=4",
)  # fmt: skip
PAIRS = (
    *EXPERTS, "parallel.pp=2", "parallel.ep=2", "moe.dispatcher=symm", "moe.balance=none",
    "moe.receive_budget=worst_case", "moe.transport=pull", TURNS, "graph.warmup_steps=2",
)  # fmt: skip
STAGES = {
    f"{schedule}{how}": (*PAIRS, f"pipeline.schedule={schedule}", *scope)
    for schedule in ("1f1b", "interleaved", "zbv", "dualpipe_v")
    for how, scope in {"": (), " partial": (PARTIAL,), " layer": (LAYER,)}.items()
    if how != " layer" or schedule in ("1f1b", "dualpipe_v")
}


def outcomes(tmp_path_factory, cases, num_ranks: int) -> dict[str, list[Outcome]]:
    trainings = {name: Training((*layouts.BASE, *words)) for name, words in cases.items()}
    return Job(tmp_path_factory.mktemp("ranks"), trainings, num_ranks, device="cuda").results(seconds=580)


@pytest.fixture(scope="module")
def exchanges(tmp_path_factory):
    return outcomes(tmp_path_factory, EXCHANGES, RANKS)


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    return outcomes(tmp_path_factory, {"alone": EXPERTS}, 1) | outcomes(tmp_path_factory, STAGES, 4)


@pytest.fixture(scope="module")
def of_deepep(tmp_path_factory):
    if not is_installed("deep_ep") or share_gpus(RANKS):
        pytest.skip("needs DeepEP and two GPUs")
    return outcomes(tmp_path_factory, OF_DEEPEP, RANKS)


@pytest.mark.parametrize("name", [name for name in EXCHANGES if " " in name])
def test_captured_exchanges_in_turns_change_no_bit(exchanges, name):
    assert_bitwise(exchanges, name)


@pytest.mark.parametrize("name", [name for name in OF_DEEPEP if name != "alltoall"])
def test_deepep_in_turns_changes_no_bit(of_deepep, name):
    assert_losses_close(of_deepep[name], of_deepep["alltoall"][0])
    assert_bitwise(of_deepep, name)


@pytest.mark.parametrize("name", STAGES)
def test_stages_in_pairs_train_as_one_gpu_and_graphs_change_no_bit(stages, name):
    assert_losses_close(stages[name], stages["alone"][0])
    assert all(torch.equal(found.rows, stages[name][0].rows) for found in stages[name])
    assert_bitwise(stages, name)
