"""A run saved in one layout goes on in another, on as many ranks or not, and in its own bitwise."""

import functools
import signal
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphmoe.checkpoint.hf import save_hf
from graphmoe.config.schema import ConfigError
from graphmoe.convert import ConvertArgs, convert
from graphmoe.generate import load_model
from graphmoe.model.build import build_model
from graphmoe.model.transformer import Transformer
from graphmoe.plan.layout import Layout, layout_of, own_part
from graphmoe.run.weights import FolderKind, load_weights, model_to_yaml, read_run
from graphmoe.runtime.ranks import Ranks
from tests.distributed.ranks import Job
from tests.distributed.training import Outcome, SignalIn, Training, gathered, quiet_trainer, without_rank_load
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
OF_FOUR = {  # layouts that go on, and the run of four or two ranks from whose second step they do
    "folded, the same": ("folded", FOLDED),
    "data parallel": ("folded", ()),
    "experts over all ranks": ("folded", ("parallel.ep=4",)),
    "other folds": ("folded", ("parallel.tp=2", "parallel.etp=2")),
    "shared out": ("folded", ("parallel.ep=2", "parallel.dp_shard=fsdp2", "parallel.dp_shard_size=2")),
}
OF_TWO = {
    "two ranks of tp": ("folded", ("parallel.tp=2",)),
    "two ranks of ep": ("folded", ("parallel.ep=2",)),
    "stages, the same": ("stages", STAGES),
    "stages, interleaved": ("stages", INTERLEAVED),
    "stages cut otherwise": ("stages", (*STAGES[:1], "pipeline.schedule=zbv", "pipeline.layout=Et|t|t|mL")),
    "stages, data parallel": ("stages", ()),
    "fsdp2, the same": ("fsdp2", FSDP),
    "fsdp2, zero1": ("fsdp2", FSDP[1:]),
    "stages of one process": ("one", INTERLEAVED),
}  # fmt: skip
ALONE = {"one process": ("folded", ()), "one process of stages": ("stages", ())}
UNTIED = ("model.tie_embeddings=false", "checkpoint.enabled=false")
OF_A_FAMILY = ("model.score_function=sigmoid", "model.renormalise=true", "model.aux_loss=sequence")
RUNS = {"folded": "fp32", "rounded": "bf16"}  # whose weights others take
KINDS = {"hf": FolderKind.hf, "own": FolderKind.graphmoe, **dict.fromkeys(RUNS, FolderKind.run)}


def stopped(ranks: Ranks, folder: Path) -> tuple[Outcome, Outcome]:
    """Run until a signal at rank 1 ends it, and the same command once more; both outcomes."""
    first = Training((*BASE, *STAGES), SignalIn(3, signal.SIGINT))(ranks, folder)
    return first, Training((*BASE, *STAGES))(ranks, folder)


def imported(words: tuple[str, ...], source: str, ranks: Ranks, folder: Path) -> dict[str, Tensor] | str:
    """Weights that a rank has of a folder, or the reason why it has none."""
    start = f"checkpoint.init_from={folder.parent / source}"
    try:
        run = config(*BASE, *UNTIED, *OF_A_FAMILY, *words, start)
        trainer, _, _ = quiet_trainer(run, folder, ranks)
    except ConfigError as error:
        return str(error)
    return {name: weight.clone() for name, weight in gathered(trainer, "main").items()}


IMPORTS = {
    "zb1p, hf": functools.partial(imported, STAGES, "hf"),
    "interleaved, own": functools.partial(imported, INTERLEAVED, "own"),
    "fsdp2, hf": functools.partial(imported, FSDP[:1], "hf"),
    "shards of gradients, own": functools.partial(imported, ("optim.grad_shard=true",), "own"),
    "lacking": functools.partial(imported, STAGES, "lacking"),
}


@pytest.fixture(scope="module")
def source(folder: Path) -> Transformer:
    """Write the model's weights into folders of each kind; one lacks some of the last layer."""
    run = config(*BASE, *UNTIED, *OF_A_FAMILY).model
    model = build_model(run, seed=5)
    for router in model.routers():
        router.selection_bias.uniform_(generator=torch.Generator().manual_seed(5))
    save_hf(model, run, folder / "hf")
    for name in ("own", "lacking"):
        convert(ConvertArgs(from_=folder / "hf", to=folder / name))
    (shard,) = (folder / "lacking").glob("*.safetensors")
    save_file({n: t for n, t in load_file(shard).items() if not n.startswith("layers.2.attn.")}, shard)
    return model


@pytest.fixture(scope="module")
def runs(folder: Path, source: Transformer) -> dict[str, list]:
    def going_on(table: dict[str, tuple[str, tuple[str, ...]]]) -> dict[str, Training]:
        start = f"checkpoint.resume_from={folder}/{{}}/checkpoints/step_00000002"
        return {name: Training((*BASE, *words, start.format(of))) for name, (of, words) in table.items()}

    one = Training((*BASE, "train.steps=2"))(Ranks(), folder / "one")
    rounded = Training((*BASE, *FOLDED, "precision.compute=bf16", "train.steps=2"))
    four = {"folded": Training((*BASE, *FOLDED)), **going_on(OF_FOUR), "rounded": rounded}
    two = {"fsdp2": Training((*BASE, *FSDP)), "stages": Training((*BASE, *STAGES)), "stopped": stopped}
    two |= going_on(OF_TWO) | IMPORTS
    found = Job(folder, four, num_ranks=4).results() | Job(folder, two).results()
    alone = {name: [run(Ranks(), folder / name)] for name, run in going_on(ALONE).items()}
    section = yaml.safe_load(model_to_yaml(config(*BASE).model))
    for name, compute in RUNS.items():
        document = {"model": section, "precision": {"compute": compute}}
        (folder / name / "resolved.yaml").write_text(yaml.safe_dump(document))
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


@pytest.mark.parametrize("name", [name for name in IMPORTS if name != "lacking"])
def test_each_rank_takes_its_layers_of_a_folder_of_weights(runs, source, name):
    state, held = dict(source.named_parameters()), set[str]()
    for weights in runs[name]:
        for parameter, weight in weights.items():
            assert torch.equal(weight, state[parameter]), parameter
        held |= weights.keys()
        assert len(weights) < len(state) or name.startswith(("fsdp2", "shards"))
    assert held == state.keys()


def test_weights_that_only_another_rank_lacks_are_missed_by_all(runs):
    for said in runs["lacking"]:
        assert isinstance(said, str) and "missing: layers.2.attn." in said and "layers.0" not in said


def assert_parts(found: dict[str, Tensor], whole: dict[str, Tensor], layout: Layout, rank: int) -> None:
    run = config(*BASE, "model.tie_embeddings=false").model
    model = build_model(run, layout=layout, rank=rank, device="meta")
    marks = {name: layout_of(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    parts = {name: own_part(whole[name], marks[name], layout, rank) for name in found}
    assert found and [name for name, part in parts.items() if not torch.equal(part, found[name])] == []


@pytest.mark.parametrize("name", RUNS)
def test_one_process_exports_and_generates_from_a_run_of_many_ranks(runs, folder, name):
    run = config(*BASE, *FOLDED)
    model, state, step = read_run(folder / name, None)
    assert (model, step) == (run.model, runs[name][0].step)
    biases = [each for each in state if each.endswith("selection_bias")]
    for rank, outcome in enumerate(runs[name]):
        found = outcome.weights | {bias: outcome.state[f"model.{bias}"] for bias in biases}
        assert_parts(found, state, Layout.of(run.parallel, 4), rank)
    loaded = load_model(folder / name, model, torch.device("cpu"))[0].state_dict()
    for each, tensor in state.items():
        rounded = RUNS[name] == "bf16" and each not in biases
        assert torch.equal(loaded[each], tensor.bfloat16().float() if rounded else tensor), each


@pytest.mark.parametrize("layout", [Layout(tp=2, ep=2), Layout(dp=2, tp=2, ep=2, etp=2), Layout()], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_each_rank_takes_its_part_of_the_weights_of_each_kind_of_folder(runs, source, folder, name, layout):
    if name in RUNS:
        model, state, _ = read_run(folder / name, None)
    else:
        model, state = source.config, source.state_dict()
    for rank in range(layout.size("world")):
        own = build_model(model, seed=7, layout=layout, rank=rank)
        assert load_weights(own, folder / name, None, layout, rank) is KINDS[name]
        assert_parts({each: own.state_dict()[each] for each in state}, state, layout, rank)
