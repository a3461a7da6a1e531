"""The loss is the mean over the trained tokens of the global batch, however it is divided."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from graphmoe.model.blocks import count_trained
from graphmoe.model.transformer import Transformer
from graphmoe.runtime.ranks import Ranks
from tests.distributed.layouts import FSDP, Case, of_ranks
from tests.distributed.ranks import Job, selected
from tests.distributed.unequal import END, NOTHING, WORDS, last_batch, model_of, trained_of, unequal, wanted
from tests.runs import metrics, train_in
from tests.tolerances import relative_error

LIMIT = 1e-6  # relative error of losses, and of all gradients together
TURNS = (
    "moe.dispatcher=symm", "moe.balance=none", "moe.receive_budget=worst_case", "pipeline.ep_overlap=true",
)  # fmt: skip
FULL, LAYERS, PARTIAL, LOSS = (
    (f"graph.scope={scope}", "graph.warmup_steps=1")
    for scope in ("full_iteration", "layer", "partial", "[loss]")
)
ROUTER = ("model.aux_loss=sequence", "model.aux_loss_coef=0.1", "model.z_loss_coef=0.1")
case_of = functools.partial(Case, model=WORDS)
SIZES = [(f"train.micro_batch_size={size}",) for size in (1, 2, 4, 8)]
FAST = (
    *(case_of(1, "", overrides=words) for words in (*SIZES, FULL)),
    Case(1, "", overrides=SIZES[1], model=(*WORDS, *ROUTER)),
    case_of(1, "", overrides=LOSS, mode="traced"),
    *(case_of(2, layout) for layout in ("cp=2", "tp=2")), case_of(2, "", overrides=FULL),
    case_of(2, "pp=2", "1f1b"), case_of(2, "pp=2", "zbv", FULL),
    case_of(2, "ep=2", "", (*TURNS, *FULL), mode="traced"), case_of(4, "pp=2 cp=2", "zb1p"),
)  # fmt: skip
SLOW = (
    *(case_of(1, "", overrides=words, mode="traced") for words in (LAYERS, FULL)),
    case_of(1, "", overrides=("recompute.all=true",)),
    case_of(2, "pp=2", "1f1b", ("pipeline.layout=Ettttm|L",)),
    case_of(2, "pp=2", "zb1p", LAYERS, mode="traced"),
    case_of(4, "pp=2 ep=2", "1f1b", (*TURNS, *FULL), mode="traced"),
    case_of(4, "cp=2 tp=2 ep=4"), case_of(4, FSDP),
)  # fmt: skip
ALIKE = (  # whose layout and whose mode are each in another case; code of Inductor has the graphs of traced
    *(case_of(1, "", overrides=words, mode="traced") for words in ((), PARTIAL)),
    case_of(1, "", mode="compiled"), *(case_of(2, layout) for layout in ("", "ep=2")),
    *(case_of(2, "ep=2", "", (*TURNS, *words), mode="traced") for words in ((), PARTIAL)),
)  # fmt: skip
MARKS = {FAST: (), SLOW: (pytest.mark.slow,), ALIKE: (pytest.mark.exhaustive,)}
CASES = [pytest.param(case, id=str(case), marks=marks) for cases, marks in MARKS.items() for case in cases]


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Outcomes of a case by rank; all cases with so many ranks that will be tested run in one job."""

    @functools.cache
    def run(num_ranks):
        cases = {str(case): case.training for case in selected(request, "case") if case.ranks == num_ranks}
        folder = tmp_path_factory.mktemp("ranks")
        if num_ranks == 1:
            return {name: [case(Ranks(), folder / name)] for name, case in cases.items()}
        return Job(folder, cases, num_ranks=num_ranks).results(seconds=900)

    return lambda case: run(case.ranks)[str(case)]


@pytest.mark.parametrize("case", CASES)
def test_a_step_has_the_sum_over_all_labels_by_their_number(outcomes, case):
    run_config = case.training.config
    of_whole = wanted(run_config)
    gradients = of_ranks(case, of_whole.gradients)
    for found, own in zip(outcomes(case), gradients, strict=True):
        *_, row = (row for row in found.written if "loss" in row)
        assert row["trained_tokens"] == of_whole.trained > 0
        losses = [row["loss"], row["mtp_loss"]]
        assert losses == pytest.approx([of_whole.loss, of_whole.mtp], rel=LIMIT)
        norm = torch.cat([each.flatten().double() for each in of_whole.gradients.values()]).norm().item()
        assert row["grad_norm"] == pytest.approx(norm, rel=LIMIT)
        parts = [torch.cat([each[name].flatten() for name in own]) for each in (found.gradients, own)]
        assert relative_error(*parts) < LIMIT


@pytest.mark.parametrize("case", CASES)
def test_a_validation_is_the_mean_over_its_trained_tokens(outcomes, case):
    run_config = case.training.config
    count, size = run_config.train.val_batches, run_config.train.micro_batch_size
    batch = torch.from_numpy(unequal(None, 16, 64).val.reader().read(0, count * size))
    with torch.no_grad():
        whole = model_of(run_config).loss(batch[:, :-1], batch[:, 1:]).cross_entropy.item()
    assert 0 < trained_of(batch) < batch.numel() / 2
    for found in outcomes(case):
        assert found.val_losses[-1].item() == pytest.approx(whole, rel=LIMIT)


def test_the_loss_of_a_whole_batch_is_a_sum_by_a_number():
    """What other tests compare with: in fp64, from the logits of the model."""
    run_config = replace(FAST[0], model=(*WORDS, "model.mtp_depth=0")).training.config
    batch, model = last_batch(run_config, unequal(None, 16, 64).train), model_of(run_config)
    trains = batch[:, :-1] != END
    logits = model(batch[:, :-1])[trains].double()
    loss = F.cross_entropy(logits, batch[:, 1:][trains], reduction="sum") / trains.sum()
    loss.backward()
    found = wanted(run_config)
    assert found.loss == pytest.approx(loss.item(), rel=LIMIT)
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    parts = [torch.cat([each[name].flatten() for name in gradients]) for each in (found.gradients, gradients)]
    assert relative_error(*parts) < LIMIT


def test_trained_labels_are_counted_by_micro_batch_and_depth():
    rows = torch.from_numpy(unequal(None, 6, 64).train.reader().read(2, 6))  # full, few, none, pairs, 2 few
    rows[1] = torch.tensor([0, 5, 5, 0, 7, 7, 7])
    counts = [[6, 5, 4], [4, 2, 0], [0, 0, 0], [3, 0, 0], [2, 1, 0], [2, 1, 0]]
    for size in (1, 2, 3):
        of_parts = torch.tensor(counts).view(-1, size, 3).sum(dim=1)
        assert count_trained(rows.split(size), END, 2).equal(of_parts)
    assert count_trained(rows.split(3), None, 2).tolist() == [[18, 15, 12]] * 2


def test_a_global_batch_that_trains_nothing_has_no_loss_and_is_visible(tmp_path):
    trained = train_in(tmp_path, *NOTHING, "train.steps=1")
    row, validation = metrics(tmp_path)
    names = ("loss", "mtp_loss", "grad_norm", "trained_tokens", "skipped")
    assert [row[name] for name in names] == [0, 0, 0, 0, False] and validation["val_loss"] is None
    assert not any(family.grad_shard.any() for family in trained.optimizer.families)


def test_without_ignored_labels_nothing_is_counted(tmp_path, monkeypatch):
    monkeypatch.delattr(Transformer, "count_trained")
    words = (*WORDS, "data.document_mask=false", "train.steps=1")
    trainer = train_in(tmp_path, *words)
    assert not trainer.plan.ignores_labels and trainer.steps.step.micro_batches._weights is None
    assert not any("trained_tokens" in row for row in metrics(tmp_path))
