"""A run saved in one layout goes on in another, on as many ranks or not, and in its own bitwise."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphmoe.checkpoint.hf import save_hf
from graphmoe.checkpoint.hf.tensor_files import TensorToWrite
from graphmoe.config.schema import ConfigError
from graphmoe.model.build import build_model
from graphmoe.model.transformer import Transformer
from graphmoe.run.weights import write_weights
from graphmoe.runtime.ranks import Ranks
from tests.distributed.ranks import Job
from tests.distributed.training import (
    Outcome,
    Training,
    gathered,
    nan_gradient_in_step_2,
    quiet_trainer,
    signal_in_step_3,
    without_rank_load,
)
from tests.runs import assert_same_state, config
from tests.tolerances import assert_forward_close

pytestmark = pytest.mark.slow
BASE = (
    "model.num_dense_layers=1", "model.num_layers=3", "model.mtp_depth=1", "model.tie_embeddings=true",
    "train.global_batch_size=8", "train.steps=5", "train.log_interval=1", "train.val_batches=2",
    "train.val_interval=4", "checkpoint.interval=2", "checkpoint.keep_last=3", "optim.bucket_mb=0.01",
    "optim.schedule=constant",
)  # fmt: skip
FOLDED = ("parallel.tp=2", "parallel.ep=2", "parallel.etp=2")
STAGES, INTERLEAVED = (("parallel.pp=2", f"pipeline.schedule={name}") for name in ("zb1p", "interleaved"))
FSDP = ("parallel.dp_shard=fsdp2", "precision.compute=bf16")
OF_FOUR = {
    "folded, the same": ("folded", FOLDED),
    "data parallel": ("folded", ()),
    "experts over all ranks": ("folded", ("parallel.ep=4",)),
    "other folds": ("folded", ("parallel.tp=2", "parallel.etp=2")),
    "shared out": ("folded", ("parallel.ep=2", "parallel.dp_shard=fsdp2")),
}
"""Layouts that go on, and the run of four or two ranks from whose second step they do."""
OF_TWO = {
    "two ranks of tp": ("folded", ("parallel.tp=2",)),
    "two ranks of ep": ("folded", ("parallel.ep=2",)),
    "stages, the same": ("stages", STAGES),
    "stages, interleaved": ("stages", INTERLEAVED),
    "stages cut otherwise": (
        "stages", ("parallel.pp=2", "pipeline.schedule=zbv", "pipeline.layout=Et|t|t|mL"),
    ),
    "stages, data parallel": ("stages", ()),
    "fsdp2, the same": ("fsdp2", FSDP),
    "fsdp2, zero1": ("fsdp2", FSDP[1:]),
    "stages of one process": ("one", INTERLEAVED),
}  # fmt: skip
ALONE = {"one process": ("folded", ()), "one process of stages": ("stages", ())}
UNTIED = ("model.tie_embeddings=false", "checkpoint.enabled=false")
OF_A_FAMILY = ("model.score_function=sigmoid", "model.renormalise=true", "model.aux_loss=sequence")
"""Words of a model that a folder of Hugging Face can describe."""


@dataclass(frozen=True)
class Stopped:
    """A run that a signal at rank 1 ends, and the same command once more; both outcomes."""

    def __call__(self, ranks: Ranks, folder: Path) -> tuple[Outcome, Outcome]:
        first = Training((*BASE, *STAGES), change=signal_in_step_3)(ranks, folder)
        return first, Training((*BASE, *STAGES))(ranks, folder)


@dataclass(frozen=True)
class Imported:
    """Weights that a rank has of a folder, or the reason why it has none."""

    words: tuple[str, ...]
    folder: str

    def __call__(self, ranks: Ranks, folder: Path) -> dict[str, Tensor] | str:
        source = f"checkpoint.init_from={folder.parent / self.folder}"
        run = config(*BASE, *UNTIED, *OF_A_FAMILY, *self.words, source)
        try:
            trainer, _, _ = quiet_trainer(run, folder, ranks)
        except ConfigError as error:
            return str(error)
        return {name: weight.clone() for name, weight in gathered(trainer, "main").items()}


IMPORTS = {
    "zb1p, hf": Imported(STAGES, "hf"),
    "interleaved, own": Imported(INTERLEAVED, "own"),
    "fsdp2, hf": Imported(FSDP[:1], "hf"),
    "lacking": Imported(STAGES, "lacking"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resumed")


@pytest.fixture(scope="module")
def source(folder: Path) -> Transformer:
    """Write the model's weights into folders of each kind; one lacks some of the last layer."""
    run = config(*BASE, *UNTIED, *OF_A_FAMILY).model
    model = build_model(run, seed=5)
    save_hf(model, run, folder / "hf")
    state = model.state_dict()
    entries = [TensorToWrite(n, tuple(t.shape), torch.float32, lambda t=t: t) for n, t in state.items()]
    for name in ("own", "lacking"):
        (folder / name).mkdir()
        write_weights(folder / name, run, entries, {}, max_bytes=2**30)
    (shard,) = (folder / "lacking").glob("*.safetensors")
    save_file({n: t for n, t in load_file(shard).items() if not n.startswith("layers.2.attn.")}, shard)
    return model


@pytest.fixture(scope="module")
def runs(folder: Path, source: Transformer) -> dict[str, list]:
    """Whole runs of five steps, and those that go on from the second step of one."""

    def going_on(table: dict[str, tuple[str, tuple[str, ...]]]) -> dict[str, Training]:
        start = f"checkpoint.resume_from={folder}/{{}}/checkpoints/step_00000002"
        return {name: Training((*BASE, *words, start.format(of))) for name, (of, words) in table.items()}

    one = Training((*BASE, "train.steps=2"))(Ranks(), folder / "one")
    four = {"folded": Training((*BASE, *FOLDED)), **going_on(OF_FOUR)}
    two = {
        "fsdp2": Training((*BASE, *FSDP)),
        "stages": Training((*BASE, *STAGES)),
        "stopped": Stopped(),
        **going_on(OF_TWO),
        **IMPORTS,
    }
    two["a bad step"] = Training((*BASE, *STAGES), change=nan_gradient_in_step_2)
    found = Job(folder, four, num_ranks=4).results() | Job(folder, two).results()
    alone = {name: [run(Ranks(), folder / name)] for name, run in going_on(ALONE).items()}
    return found | alone | {"one": [one]}


@pytest.mark.parametrize("name", [*OF_FOUR, *OF_TWO, *ALONE])
def test_a_run_goes_on_in_another_layout_with_the_same_losses(runs, name):
    of, _ = (OF_FOUR | OF_TWO | ALONE)[name]
    whole = runs["stages" if of == "one" else of][0]
    for found in runs[name]:
        assert found.step == whole.step == len(whole.rows) == 5
        assert_forward_close(without_rank_load(found.rows), without_rank_load(whole.rows[2:]))
        assert_forward_close(found.val_losses[-2:], whole.val_losses[-2:])
        assert [row["tokens"] for row in found.written if "loss" in row] == [8 * 16 * n for n in (3, 4, 5)]


@pytest.mark.parametrize("name", ["folded", "stages", "fsdp2"])
def test_a_run_goes_on_bitwise_in_its_own_layout(runs, name):
    for found, whole in zip(runs[f"{name}, the same"], runs[name], strict=True):
        assert torch.equal(found.rows, whole.rows[2:])
        assert_same_state(found.state, whole.state)


def test_the_run_that_was_resumed_from_stays_as_it_was(runs, folder):
    checkpoints = (folder / "folded" / "checkpoints").iterdir()
    assert sorted(path.name for path in checkpoints) == [f"step_{n:08d}" for n in (2, 4, 5)]


def test_a_run_stopped_by_a_signal_at_the_last_stage_goes_on_bitwise(runs):
    for (first, then), whole in zip(runs["stopped"], runs["stages"], strict=True):
        assert first.stopped_by == "SIGINT" and 3 <= first.step < 5
        assert torch.equal(torch.cat([first.rows, then.rows]), whole.rows)
        assert_same_state(then.state, whole.state)


def test_a_gradient_that_only_the_last_stage_finds_not_finite_skips_the_step_on_all_ranks(runs):
    for found in runs["a bad step"]:
        assert [row["skipped"] for row in found.written if "loss" in row] == [False, True, *[False] * 3]
        assert found.step == 5 and found.state["optimizer.counters.skipped"] == 1
        assert all(bool(torch.isfinite(weight).all()) for weight in found.weights.values())


@pytest.mark.parametrize("name", ["zb1p, hf", "interleaved, own", "fsdp2, hf"])
def test_each_rank_takes_its_layers_of_a_folder_of_weights(runs, source, name):
    state, held = dict(source.named_parameters()), set[str]()
    for weights in runs[name]:
        for parameter, weight in weights.items():
            assert torch.equal(weight, state[parameter]), parameter
        held |= weights.keys()
        assert len(weights) < len(state) or name.startswith("fsdp2")
    assert held == state.keys()


def test_weights_that_only_another_rank_lacks_are_missed_by_all(runs):
    for said in runs["lacking"]:
        assert isinstance(said, str) and "missing: layers.2.attn." in said and "layers.0" not in said
