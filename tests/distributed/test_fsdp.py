"""parallel.dp_shard=fsdp2: a rank keeps its share of weights and moments, and has one layer whole at a time.

`tests/distributed/test_layouts.py` compares its runs with one process, test_resumed.py resumes them.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from graphmoe.checkpoint.flat_shards import FlatShard
from graphmoe.config.schema import ConfigError, DpShard
from graphmoe.model.sizes import state_bytes
from graphmoe.plan.rules.check import check
from graphmoe.runtime.ranks import Ranks
from tests.distributed.ranks import run_ranks
from tests.distributed.training import quiet_trainer
from tests.runs import config, trainer_in

BASE = (
    "model.num_dense_layers=1", "train.steps=2", "train.log_interval=3", "train.val_batches=0",
    "train.global_batch_size=8", "checkpoint.enabled=false", "optim.schedule=constant",
)  # fmt: skip
FSDP = "parallel.dp_shard=fsdp2"


@dataclass
class Kept:
    """Findings of a rank at the end of a run."""

    weights: dict[str, FlatShard]
    sizes: tuple[int, int, int]
    """Elements of weights, main weights and moments between steps."""
    whole: list[set[str]]
    """The parameters that were whole when the second layer ran."""


@dataclass(frozen=True)
class Keeping:
    """A run, as a case of ``run_ranks``."""

    words: tuple[str, ...] = ()

    def __call__(self, ranks: Ranks, folder: Path) -> Kept:
        trainer, _, _ = quiet_trainer(config(*BASE, FSDP, *self.words), folder, ranks)
        found: list[set[str]] = []

        def note(*_) -> None:
            parameters = trainer.model.named_parameters()
            found.append({name for name, weight in parameters if not isinstance(weight, DTensor)})

        trainer.model.layers[1].attn.register_forward_pre_hook(note)
        trainer.run()
        optimizer = trainer.optimizer
        weights = sum(weight.to_local().numel() for weight in trainer.model.parameters())
        kinds = ((optimizer.main,), optimizer.moments.values())
        main, moments = (sum(t.numel() for kind in of for t in kind.values()) for of in kinds)
        return Kept(dict(optimizer.weights_to_fill()), (weights, main, moments), found)


KEEPING = {
    "six experts for four": Keeping(("model.num_experts=6",)),
    "ep2": Keeping(("parallel.ep=2",)),
    "tp2 ep4, later tokens": Keeping(("parallel.tp=2", "parallel.ep=4", "model.mtp_depth=2")),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Kept]]:
    """Findings of four ranks."""
    return run_ranks(tmp_path_factory.mktemp("ranks"), KEEPING, num_ranks=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", KEEPING)
def test_a_rank_keeps_its_share_of_weights_and_moments_and_has_one_layer_whole(ranks, name):
    run, layout = config(*BASE, *KEEPING[name].words), next(iter(ranks[name][0].weights.values())).layout
    expected = state_bytes(run.model, layout, dp_shard=DpShard.fsdp2)
    weights, main, moments = (
        4 * sum(kind) / 4 for kind in zip(*(rank.sizes for rank in ranks[name]), strict=True)
    )
    assert weights == main == expected["main_weights_fp32"] and moments == expected["moments_fp32"]
    for rank in ranks[name]:
        own = {parameter for parameter in rank.weights if parameter.startswith("layers.1.")}
        assert rank.whole and all(names == own for names in rank.whole)
        assert rank.sizes[1] < (1.6 if "six" in name else 1.1) * expected["main_weights_fp32"] / 4


@pytest.mark.slow
def test_each_element_is_owned_once_where_ranks_have_unequal_parts_or_none(ranks):
    held: dict[str, torch.Tensor] = {}
    found = ranks["six experts for four"]
    sizes = [rank.weights["layers.1.moe_experts.w_down"].data.numel() for rank in found]
    assert sizes[0] == sizes[1] == sizes[2] > 0 == sizes[3]
    for name, shard in (item for rank in found for item in rank.weights.items()):
        count = held.setdefault(name, torch.zeros(shard.shape.numel()))
        count[shard.start : shard.start + shard.data.numel()] += 1
    assert all(bool((count == 1).all()) for count in held.values())


def test_keys_that_fsdp2_does_not_go_with_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"graph.scope=layer replays.*use graph.scope=none"):
        check(config(FSDP, "compile.enabled=true", "graph.scope=layer"))
    with pytest.raises(ConfigError, match=r"dp_shard=fsdp2 shares .* use parallel.dp_shard=zero1"):
        trainer_in(tmp_path, FSDP)
