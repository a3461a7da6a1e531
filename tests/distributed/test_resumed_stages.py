"""Runs whose ranks share out layers start from weights and checkpoints of other layouts, and stop alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphmoe.checkpoint.hf import save_hf
from graphmoe.checkpoint.hf.shards import Entry
from graphmoe.config.schema import ConfigError
from graphmoe.model.build import build_model
from graphmoe.model.transformer import Transformer
from graphmoe.run.weights import write_weights
from graphmoe.runtime.ranks import Ranks
from tests.distributed.ranks import Case, Job
from tests.distributed.training import (
    Outcome,
    Training,
    assert_went_on,
    nan_gradient_in_step_2,
    quiet_trainer,
    signal_in_step_3,
)
from tests.runs import assert_same_state, config

BASE = (
    "model.num_dense_layers=1", "model.num_layers=3", "model.mtp_depth=1", "model.tie_embeddings=true",
    "train.global_batch_size=8", "train.steps=5", "train.log_interval=1", "train.val_batches=2",
    "train.val_interval=4", "checkpoint.interval=2", "checkpoint.keep_last=3", "optim.bucket_mb=0.01",
    "optim.schedule=constant",
)  # fmt: skip
ZB1P, INTERLEAVED = (("parallel.pp=2", f"pipeline.schedule={name}") for name in ("zb1p", "interleaved"))
OTHERS = {
    "interleaved": INTERLEAVED,
    "another layout": ("parallel.pp=2", "pipeline.schedule=zbv", "pipeline.layout=Et|t|t|mL"),
    "data parallel": (),
}
ALONE = "one process"
UNTIED = ("model.tie_embeddings=false", "checkpoint.enabled=false")
OF_A_FAMILY = ("model.score_function=sigmoid", "model.renormalise=true", "model.aux_loss=sequence")
"""What a folder of Hugging Face can say."""


@dataclass(frozen=True)
class Stopped:
    """A run that a signal at rank 1 ends, and the same command once more; both outcomes."""

    words: tuple[str, ...]

    def __call__(self, ranks: Ranks, folder: Path) -> tuple[Outcome, Outcome]:
        first = Training((*BASE, *self.words), change=signal_in_step_3)(ranks, folder)
        return first, Training((*BASE, *self.words))(ranks, folder)


@dataclass(frozen=True)
class Imported:
    """What a rank has of the weights of a folder, or why it has none."""

    words: tuple[str, ...]
    folder: str

    def __call__(self, ranks: Ranks, folder: Path) -> dict[str, Tensor] | str:
        source = f"checkpoint.init_from={folder.parent / self.folder}"
        run = config(*BASE, *UNTIED, *OF_A_FAMILY, *self.words, source)
        try:
            trainer, _, _ = quiet_trainer(run, folder, ranks)
        except ConfigError as error:
            return str(error)
        return {name: weight.clone() for name, weight in trainer.optimizer.weights_to_fill().items()}


IMPORTS = {
    f"{words[1].partition('=')[2]}, {kind}": Imported(words, kind)
    for words, kind in ((ZB1P, "hf"), (INTERLEAVED, "own"), (ZB1P, "lacking"))
}


def write_folders(folder: Path) -> Transformer:
    """Folders of each kind of the returned model's weights, and one that lacks some of the last layer."""
    run = config(*BASE, *UNTIED, *OF_A_FAMILY).model
    model = build_model(run, seed=5)
    save_hf(model, run, folder / "hf")
    state = model.state_dict()
    entries = [Entry(n, tuple(t.shape), torch.float32, lambda t=t: t) for n, t in state.items()]
    for name in ("own", "lacking"):
        (folder / name).mkdir()
        write_weights(folder / name, run, entries, {}, max_bytes=2**30)
    (shard,) = (folder / "lacking").glob("*.safetensors")
    save_file({n: t for n, t in load_file(shard).items() if not n.startswith("layers.2.attn.")}, shard)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="module")
def source(folder: Path) -> Transformer:
    """What was written into the folders."""
    return write_folders(folder)


@pytest.fixture(scope="module")
def runs(folder: Path, source: Transformer) -> dict[str, list]:
    """A run of five steps by two ranks, what was done from its second on, and what stands alone."""
    start = f"checkpoint.resume_from={folder}/whole/checkpoints/step_00000002"
    of_one = f"checkpoint.resume_from={folder}/one/checkpoints/step_00000002"
    one = Training((*BASE, "train.steps=2"))(Ranks(), folder / "one")
    cases: dict[str, Case] = {"whole": Training((*BASE, *ZB1P)), "stopped": Stopped(ZB1P)}
    cases |= {name: Training((*BASE, *words, start)) for name, words in OTHERS.items()}
    cases |= {"from one process": Training((*BASE, *INTERLEAVED, of_one)), **IMPORTS}
    cases["a bad step"] = Training((*BASE, *ZB1P), change=nan_gradient_in_step_2)
    found = Job(folder, cases).results()
    return found | {ALONE: [Training((*BASE, start))(Ranks(), folder / "alone")], "one": [one]}


@pytest.mark.parametrize("name", [*OTHERS, ALONE, "from one process"])
def test_a_run_goes_on_in_another_layout_with_the_same_losses(runs, name):
    for found in runs[name]:
        assert found.step == 5
        assert_went_on(found, runs["whole"][0], step=2)


def test_stopped_by_a_signal_at_the_last_stage_it_goes_on_bitwise(runs):
    for (first, then), whole in zip(runs["stopped"], runs["whole"], strict=True):
        assert first.stopped_by == "SIGINT" and 3 <= first.step < 5
        assert torch.equal(torch.cat([first.rows, then.rows]), whole.rows)
        assert_same_state(then.state, whole.state)


def test_a_gradient_that_only_the_last_stage_finds_not_finite_skips_the_step_on_all_ranks(runs):
    for found in runs["a bad step"]:
        assert [row["skipped"] for row in found.written if "loss" in row] == [False, True, *[False] * 3]
        assert found.step == 5 and found.state["optimizer.counters.skipped"] == 1
        assert all(bool(torch.isfinite(weight).all()) for weight in found.weights.values())


@pytest.mark.parametrize("name", list(IMPORTS)[:2])
def test_each_rank_takes_its_layers_of_a_folder_of_weights(runs, source, name):
    state, held = dict(source.named_parameters()), set[str]()
    for weights in runs[name]:
        for parameter, weight in weights.items():
            assert torch.equal(weight, state[parameter]), parameter
        held |= weights.keys()
        assert len(weights) < len(state)
    assert held == state.keys()


def test_weights_that_only_another_rank_lacks_are_missed_by_all(runs):
    for said in runs[list(IMPORTS)[2]]:
        assert isinstance(said, str) and "missing: layers.2.attn." in said and "layers.0" not in said
