"""Weights of each kind of folder for ranks that share parameters, and runs of such ranks for one process."""

import functools
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn

from graphmoe.checkpoint import CheckpointStore
from graphmoe.checkpoint.flat_shards import FlatShard, shards_of
from graphmoe.checkpoint.hf import save_hf
from graphmoe.config.schema import CheckpointConfig, ModelConfig, ScoreFunction
from graphmoe.generate import load_model
from graphmoe.model.build import build_model
from graphmoe.plan.layout import ALONE, REPLICATED, Cut, Layout, ParameterLayout, layout_of, own_part
from graphmoe.run.weights import FolderKind, load_weights, model_to_yaml, read_run
from graphmoe.runtime.ranks import Ranks
from tests.distributed.ranks import run_ranks

CONFIG = ModelConfig(
    vocab_size=54,
    hidden_size=18,
    num_layers=2,
    dense_ffn_size=21,
    num_heads=3,
    q_lora_rank=7,
    kv_lora_rank=10,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
    num_experts=6,
    top_k=2,
    expert_ffn_size=9,
    shared_ffn_size=18,
    score_function=ScoreFunction.sigmoid,
    renormalise=True,
    selection_bias=True,
    context_length=128,
)
CUTS = {
    "head.weight": ParameterLayout((Cut(0, "tp"),), "dp_cp"),
    "out_proj.weight": ParameterLayout((Cut(1, "tp"),), "dp_cp"),
    "gate_up.weight": ParameterLayout((Cut(0, "tp", 2),), "dp_cp"),
    "w_gate_up": ParameterLayout((Cut(0, "ep"), Cut(1, "etp", 2)), "edp"),
    "w_down": ParameterLayout((Cut(0, "ep"), Cut(2, "etp")), "edp"),
}
pytestmark = pytest.mark.slow
LAYOUTS = [Layout(tp=3, ep=3), Layout(dp=3, tp=3, ep=3, etp=3), ALONE]


def cut_model(layout: Layout, rank: int, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a rank's part of a model of random weights, the router's bias too."""
    model, random = build_model(CONFIG, seed=seed, dtype=dtype), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=random))
    for module in model.modules():
        for name, whole in list(module.named_parameters(recurse=False)):
            full = next(full for full, each in model.named_parameters() if each is whole)
            parallel = next((cut for end, cut in CUTS.items() if full.endswith(end)), REPLICATED)
            part = nn.Parameter(own_part(whole.detach(), parallel, layout, rank).contiguous())
            part.parallel = parallel
            setattr(module, name, part)
    return model


def parts_of(exact: nn.Module, model: nn.Module, layout: Layout, rank: int) -> dict[str, Tensor]:
    """Return a rank's weights after it took those of an exact model."""
    marks = {name: layout_of(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    wholes = exact.state_dict().items()
    return {name: own_part(whole, marks[name], layout, rank).to(whole.dtype) for name, whole in wholes}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])] == []


def main_shards(model: nn.Module, layout: Layout, rank: int) -> dict[str, FlatShard]:
    """The fp32 weights that a rank owns with ZeRO-1; those of norms are the last rank's."""
    found = {}
    for name, part in model.named_parameters():
        axis, length = layout_of(part).summed_over, part.numel()
        index, size = layout.index(axis, rank), layout.size(axis)
        bounds = [0] * size + [length] if part.dim() == 1 else [length * i // size for i in range(size + 1)]
        start, stop = bounds[index], bounds[index + 1]
        if start < stop:
            flat = part.detach().view(-1)[start:stop]
            found[name] = FlatShard(flat, start, part.shape, layout_of(part), layout, rank)
    return found


def write_run(folder: Path, compute: str) -> None:
    section = yaml.safe_load(model_to_yaml(CONFIG))
    folder.mkdir(parents=True, exist_ok=True)
    document = yaml.safe_dump({"model": section, "precision": {"compute": compute}})
    (folder / "resolved.yaml").write_text(document)


def save_as_rank(layout: Layout, dtype: torch.dtype, ranks: Ranks, folder: Path) -> None:
    """A case: a run's checkpoint of a layout's ranks."""
    exact = cut_model(layout, ranks.rank, seed=3)
    model = cut_model(layout, ranks.rank, seed=3, dtype=dtype)
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        ours.data.copy_(theirs)
    main = main_shards(exact, layout, ranks.rank) if dtype != torch.float32 else {}
    store = CheckpointStore(folder / "checkpoints", CheckpointConfig())
    store.save(5, {"model": shards_of(model, layout, ranks.rank), "optimizer": {"main": main}})
    store.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that three ranks saved, each rank with a third of what is cut."""
    root, layout = tmp_path_factory.mktemp("runs"), Layout(tp=3, ep=3)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for compute in dtypes:
        write_run(root / compute, compute)
    run_ranks(root, {c: functools.partial(save_as_rank, layout, d) for c, d in dtypes.items()}, num_ranks=3)
    return root


@pytest.fixture(scope="module")
def exact() -> nn.Module:
    return cut_model(ALONE, 0, seed=3)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["hf", "fp32", "bf16"])
def test_each_rank_takes_its_part_of_the_weights_of_each_kind_of_folder(runs, exact, tmp_path, kind, layout):
    if kind == "hf":
        save_hf(exact, CONFIG, tmp_path / "hf")
    for rank in range(layout.size("world")):
        model = cut_model(layout, rank, seed=7)
        found = load_weights(model, tmp_path / "hf" if kind == "hf" else runs / kind, None, layout, rank)
        assert found is (FolderKind.hf if kind == "hf" else FolderKind.run)
        assert_same(model.state_dict(), parts_of(exact, model, layout, rank))


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_one_process_exports_and_generates_from_a_run_of_many_ranks(runs, exact, compute):
    config, state, step = read_run(runs / compute, None)
    assert (config, step) == (CONFIG, 5)
    assert_same(state, exact.state_dict())
    model, step = load_model(runs / compute, CONFIG, torch.device("cpu"))
    rounded = {
        name: tensor.bfloat16().float() if compute == "bf16" and "selection_bias" not in name else tensor
        for name, tensor in exact.state_dict().items()
    }
    assert step == 5
    assert_same(model.state_dict(), rounded)
