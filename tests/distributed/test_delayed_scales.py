"""Delayed scales of products with one scale for a whole tensor: the same on all ranks that share a layer."""

import pytest
import torch

from tests.distributed.ranks import run_ranks
from tests.distributed.training import Training, as_traced
from tests.runs import QUIET, spoil_steps, trainer_in

STEPS = 2
WORDS = (
    "model.hidden_size=64", "model.expert_ffn_size=32", "model.shared_ffn_size=32", "model.dense_ffn_size=64",
    "model.qk_nope_head_dim=16", "model.qk_rope_head_dim=16", "model.v_head_dim=16", "model.kv_lora_rank=16",
    "model.tie_embeddings=true", "model.num_layers=4", "train.micro_batch_size=1", "train.val_batches=0",
    "compile.enabled=true", "compile.cache=false", "precision.fp8=tensorwise", f"train.steps={STEPS}",
    "checkpoint.interval=0",
)  # fmt: skip
LAYOUTS = {
    "dp": (),
    "tp": ("parallel.tp=2",),
    "ep": ("parallel.ep=2", "moe.dispatcher=symm", "moe.balance=none", "moe.receive_budget=worst_case"),
    "pp": ("parallel.pp=2", "pipeline.schedule=interleaved"),
}
"""Layouts of two ranks; with pp each has two stages, and both have the embedding."""
OF_ONE_TENSOR = {
    "moe_experts.w_gate_up.fp8_scale_of_input": "shared_experts.gate_up.weight.fp8_scale_of_input",
    "shared_experts.down.weight.fp8_scale_of_gradient": "moe_experts.w_down.fp8_scale_of_gradient",
}
"""Scales of what other products read too where one unit has both: then the former stay as they began."""
Values = dict[str, list[float]]


@pytest.fixture(scope="module")
def scales(tmp_path_factory) -> dict[str, list[Values]]:
    """Scales with their history by layout and rank; by "a, b" those of a's checkpoint as b begins with it."""
    folder = tmp_path_factory.mktemp("scales")

    def cases(*layouts: str, source: str = "") -> dict[str, Training]:
        begin = (f"checkpoint.resume_from={folder / source}",) if source else ()
        words = {name: (*WORDS, *LAYOUTS.get(name, ()), *begin) for name in layouts}
        return {f"{source}, {n}" if source else n: Training(w, traced=True) for n, w in words.items()}

    found = run_ranks(folder, cases("one"), 1)
    found |= run_ranks(folder, cases(*LAYOUTS) | cases("dp", "pp", source="one") | cases("dp", source="pp"))
    again = [cases("one", source=source) for source in LAYOUTS]
    found |= run_ranks(folder, {name: case for each in again for name, case in each.items()}, 1)
    return {name: [outcome.scales for outcome in outcomes] for name, outcomes in found.items()}


def moved(values: Values) -> Values:
    return {name: each for name, each in values.items() if each[1] > 0}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_of_several_ranks_are_those_of_one_with_the_same_batch(scales, layout):
    (one,), ranks = scales["one"], scales[layout]
    if layout == "pp":
        names = [{name for name in rank if not name.startswith("embed.")} for rank in ranks]
        assert not names[0] & names[1] and min(map(len, names)) > 20
    else:
        assert ranks[0] == ranks[1]
    found = ranks[0] | ranks[1]
    assert found.keys() == one.keys() and moved(found).keys() >= moved(one).keys()
    for name, values in moved(found).items():
        layer = ".".join(name.split(".")[:2])
        same = OF_ONE_TENSOR.get(name.removeprefix(f"{layer}."))
        wanted = one[name if same is None or name in moved(one) else f"{layer}.{same}"]
        assert values[0] == wanted[0], name
        assert values[1:] == pytest.approx(wanted[1:], rel=1e-5), name
        assert min(values[1 : STEPS + 1]) > 0 == max(values[STEPS + 1 :])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "layout"), [*((name, "one") for name in LAYOUTS), ("one", "dp"), ("one", "pp"), ("pp", "dp")]
)
def test_a_run_goes_on_with_the_scales_of_another_layout(scales, source, layout):
    saved = scales[source][0] | scales[source][-1]
    for rank, began in zip(scales[f"{source}, {layout}"], scales[layout], strict=True):
        assert rank.keys() == began.keys() and moved(rank)
        assert all(rank[name] == saved[name] for name in rank)


def test_a_step_that_is_void_or_not_finite_leaves_the_scales_as_they_were(tmp_path, monkeypatch):
    void, loss, gradients = 2, 4, 6
    one_layer = "model.num_layers=1", "model.num_dense_layers=0", "train.global_batch_size=2"
    with as_traced():
        trainer = trainer_in(tmp_path, *WORDS, *one_layer, *QUIET)
        spoil_steps(monkeypatch, trainer, {loss})
        spoil_steps(monkeypatch, trainer, {gradients}, only_gradients=True)
        found = {}
        for step in range(1, 8):
            trainer.optimizer.void.fill_(float(step == void))
            trainer._train_step()
            found[step] = trainer.optimizer.scales.values()
        trainer.loader.close()
    for step in (void, loss, gradients):
        before, after = found[step - 1], found[step + 1]
        assert before == found[step] and moved(before)
        assert all(after[name][2] == values[1] for name, values in moved(before).items())
        assert torch.tensor([*after.values()]).isfinite().all()
