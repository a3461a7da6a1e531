"""Capture on a GPU: replays are bitwise the uncaptured steps, never wait, and copy nothing to the host."""

import json
from typing import Any, NamedTuple

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from graphmoe.model.transformer import Transformer
from graphmoe.runtime.capture import REPORT_FILE
from graphmoe.training.saves import first_not_finite
from tests.gpu.sleeping import assert_host_is_back_while_the_device_sleeps, syncs_are_errors
from tests.gpu.tiny import COMPILED, DOCUMENTS, GPU
from tests.runs import assert_load_swings, metrics, numbers, train_in, trainer_in

CAPTURED, COMPILE, EAGER = "graph.scope=full_iteration", "compile.enabled=true", "compile.enabled=false"
SMALL = (*GPU, "model.num_layers=2", "optim.schedule=constant")
"""One shape for all runs that are compared, so that most of them find their code compiled."""
STEPS = ("train.steps=20", "train.val_interval=10", "checkpoint.interval=10", "train.log_interval=5")
MTP = "model.mtp_depth=1"  # units without a gradient of inputs, and twice in flight
RECOMPUTED = "recompute.all=true"
CLIPPED = "optim.name=muon", "optim.qk_clip=5.55"  # the log-sum-exp of 256 logits of 0 is 5.545
CASES = (
    (EAGER, CAPTURED),
    (COMPILE, CAPTURED),
    (COMPILE, "graph.scope=layer"),
    (COMPILE, "graph.scope=partial"),
    (COMPILE, "graph.scope=[embed,moe_experts,loss]"),
    (COMPILE, CAPTURED, "train.micro_batch_size=4"),
    (COMPILE, "graph.scope=layer", "train.micro_batch_size=4"),
    (COMPILE, "graph.scope=partial", "train.micro_batch_size=1"),
    (COMPILE, CAPTURED, *DOCUMENTS),
    (COMPILE, "graph.scope=partial", *DOCUMENTS),
    (COMPILE, CAPTURED, *CLIPPED),
    (COMPILE, "graph.scope=partial", *CLIPPED),
    (EAGER, CAPTURED, RECOMPUTED),
    (COMPILE, CAPTURED, RECOMPUTED, "train.micro_batch_size=1"),
    (COMPILE, "graph.scope=layer", RECOMPUTED),
    (COMPILE, "graph.scope=partial", "recompute.segments=[attn,moe_experts]", "recompute.ops=[layernorm]"),
)
"""Words of runs that are bitwise those without capture."""
WORKERS = 6
"""Workers to which the tests of this file are dealt: no fixture takes long."""


class Trained(NamedTuple):
    """Metrics of a run, its fp32 weights and the report of its capture."""

    rows: list[dict[str, Any]]
    weights: list[torch.Tensor]
    report: dict[str, Any]
    """Report of the capture; empty where nothing was captured."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    runs: dict[tuple[str, ...], Trained] = {}

    def train(*words: str) -> Trained:
        if words not in runs:
            folder = tmp_path_factory.mktemp("run")
            weights = [weight.clone() for weight in train_in(folder, *words).optimizer.main]
            report = folder / REPORT_FILE
            found = json.loads(report.read_text()) if report.exists() else {}
            runs[words] = Trained(numbers(folder), weights, found)
        return runs[words]

    return train


def uncaptured(words: tuple[str, ...], steps: int) -> tuple[str, ...]:
    """The same words without capture. A list of segments still cuts the compiled units."""
    return (*words, "graph.scope=none" if CAPTURED in words else f"graph.warmup_steps={steps}")


def assert_bitwise(captured: Trained, plain: Trained) -> None:
    assert captured.report and not plain.report
    assert captured.rows == plain.rows
    for one, other in zip(captured.weights, plain.weights, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("words", CASES, ids=",".join)
def test_twenty_steps_are_bitwise_the_uncaptured_ones(trained, deterministic_words, words):
    words = (*SMALL, *deterministic_words, *STEPS, MTP, *words)
    captured = trained(*words)
    assert_bitwise(captured, trained(*uncaptured(words, 20)))
    assert captured.report["on"] == "device" and captured.report["pool_bytes"] > 0


@pytest.mark.parametrize("words", [CASES[0], CASES[2]], ids=",".join)
def test_recomputed_activations_leave_the_losses_as_they_were(trained, deterministic_words, words):
    words = (*SMALL, *deterministic_words, *STEPS, MTP, *words)
    for kept, again in zip(trained(*words).rows, trained(*words, RECOMPUTED).rows, strict=True):
        assert again.get("loss") == pytest.approx(kept.get("loss"), rel=2e-3)


@pytest.mark.parametrize("words", [CASES[0], CASES[2]], ids=",".join)
def test_a_captured_run_goes_on_bitwise_where_it_stopped(tmp_path, trained, deterministic_words, words):
    words = (*SMALL, *deterministic_words, *STEPS, MTP, *words)
    train_in(tmp_path, *words, "train.steps=10")
    train_in(tmp_path, *words)
    later = [[row for row in rows if row["step"] > 10] for rows in (numbers(tmp_path), trained(*words).rows)]
    assert later[0] == later[1]


@pytest.mark.parametrize("scope", ["full_iteration", "layer"])
def test_a_load_that_swings_from_step_to_step_changes_no_bit(
    trained, deterministic_words, swinging_load, scope
):
    words = (
        *SMALL, *deterministic_words, COMPILE, "model.top_k=1", "train.global_batch_size=2",
        "train.steps=20", "train.val_batches=0", "checkpoint.interval=0",
    )  # fmt: skip
    captured = trained(*words, f"graph.scope={scope}")
    assert_bitwise(captured, trained(*words))
    assert_load_swings(captured.rows, num_experts=8, after=3)


@pytest.mark.slow
def test_two_hundred_steps_on_real_text_are_bitwise_the_uncaptured_ones(trained, deterministic_words):
    words = (
        *SMALL, *deterministic_words, COMPILE, "data.source=stdlib", "data.bpe_vocab_size=512",
        "train.steps=200", "train.val_interval=100", "checkpoint.interval=0", "train.log_interval=20",
    )  # fmt: skip
    captured = trained(*words, CAPTURED)
    assert_bitwise(captured, trained(*words))
    losses = [row["loss"] for row in captured.rows if "loss" in row]
    assert len(losses) == 200 and losses[-1] < 0.9 * losses[0]


@COMPILED
def test_a_replayed_step_never_waits_and_copies_only_its_row_to_the_host(warm, compiled):
    trainer = warm(CAPTURED, compiled, steps=5)
    with syncs_are_errors(), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(3):
            trainer._train_step()
    torch.cuda.synchronize()
    names = [event.name for event in trace.events()]
    assert sum(name in ("cudaGraphLaunch", "hipGraphLaunch") for name in names) == 3
    waits = ("StreamSynchronize", "EventSynchronize")  # the profiler itself waits for the device
    assert not [name for name in names if name.endswith(waits)]
    directions = ("DtoH", "DeviceToHost", "Device -> Host")
    to_host = [name for name in names if any(word in name for word in directions)]
    assert len(to_host) == 3 and not any("Pageable" in name for name in to_host)
    assert_host_is_back_while_the_device_sleeps(trainer._train_step)


@pytest.mark.parametrize("scope", ["layer", "partial"])
def test_replayed_units_never_wait(warm, scope):
    # One layer and one micro-batch: eager launches of more would take the host longer than the limit.
    few = ("model.num_layers=1", "model.num_dense_layers=0", "train.micro_batch_size=4")
    trainer = warm(COMPILE, f"graph.scope={scope}", *few, steps=5)
    with syncs_are_errors():
        for _ in range(3):
            trainer._train_step()
    assert_host_is_back_while_the_device_sleeps(trainer._train_step)


def test_the_pool_of_captured_layers_is_little_more_than_what_a_step_needs(warm):
    words = (COMPILE, "model.num_layers=8", "model.hidden_size=512")
    trainer = warm(*words)
    torch.cuda.reset_peak_memory_stats()
    lasting = torch.cuda.memory_allocated()
    trainer._train_step()
    of_a_step = torch.cuda.max_memory_allocated() - lasting
    trainer = warm(*words, "graph.scope=layer")
    trainer._train_step()
    assert 0 < trainer.execution.capture.maker.pool_bytes() < 1.25 * of_a_step


@COMPILED
def test_the_nodes_of_the_report_are_what_the_device_runs_in_a_replayed_step(warm, compiled):
    trainer = warm(CAPTURED, compiled, steps=5)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        trainer._train_step()
        torch.cuda.synchronize()
    ran = sum(event.device_type == DeviceType.CUDA for event in trace.events())
    nodes = trainer.execution.capture.report.sums()["nodes"]
    assert nodes is not None and 0.9 < nodes / ran < 1.1  # tokens and metrics are copied outside the graph


@pytest.mark.parametrize("scope", ["full_iteration", "layer", "partial"])
def test_a_replay_that_is_not_finite_changes_nothing_and_a_weight_that_moves_is_named(
    warm, monkeypatch, scope
):
    scale, whole = torch.ones((), device="cuda"), Transformer.loss

    def loss(self, *arguments):
        output = whole(self, *arguments)
        return output._replace(total=output.total * scale)

    monkeypatch.setattr(Transformer, "loss", loss)
    trainer = warm(COMPILE, f"graph.scope={scope}", "model.num_layers=2", steps=5)
    optimizer, report = trainer.optimizer, trainer.execution.capture.report
    for bad in (True, False):
        scale.fill_(torch.nan if bad else 1.0)
        before = [weight.clone() for weight in optimizer.main]
        trainer._train_step()
        assert all(map(torch.equal, before, optimizer.main)) == bad
    assert (optimizer.applied.item(), optimizer.skipped.item()) == (6, 1)
    assert report.sums()["nodes"] >= report.sums()["graphs"] > 0
    weight = trainer.model.get_parameter("layers.1.attn.norm.weight")
    weight.data = weight.data.clone()
    with pytest.raises(RuntimeError, match="layers.1.attn.norm.weight moved after"):
        trainer._train_step()


@COMPILED
@pytest.mark.parametrize("scope", ["none", "full_iteration"])
def test_gradients_whose_squares_overflow_are_skipped(tmp_path, compiled, scope):
    words = (
        *SMALL, compiled, f"graph.scope={scope}", "train.steps=8", "train.max_nonfinite=9",
        "train.val_batches=0", "train.log_interval=1", "checkpoint.interval=0",
    )  # fmt: skip
    huge = ("model.aux_loss=sequence", "model.aux_loss_coef=1e27", "train.clip_grad_norm=0")
    trainer = trainer_in(tmp_path, *words, *huge)
    optimizer = trainer.optimizer
    before = [tensor.clone() for tensor in (*optimizer.main, *optimizer.state_dict()["exp_avg"].values())]
    trainer.run()
    rows = metrics(tmp_path)
    assert rows[-1]["skipped_total"] == len(rows) == 8
    after = (*optimizer.main, *optimizer.state_dict()["exp_avg"].values())
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert first_not_finite({"optimizer": optimizer.state_dict()}) is None


@pytest.mark.parametrize("scope", ["none", "full_iteration"])
def test_a_transient_fault_leaves_no_trace(tmp_path, caplog, scope):
    words = (
        *SMALL,
        EAGER,
        f"graph.scope={scope}",
        *STEPS,
        "precision.deterministic=true",
        "train.rerun=true",
    )
    plain = train_in(tmp_path / "plain", *words)
    found = train_in(tmp_path / "fault", *words, "train.inject_fault=transient:0:12")
    assert numbers(tmp_path / "fault") == numbers(tmp_path / "plain")
    assert all(map(torch.equal, found.optimizer.main, plain.optimizer.main))
    assert "step 12 ran again" in caplog.text and "a transient fault of rank 0 on" in caplog.text
    assert "UUID" in caplog.text and str(torch.cuda.get_device_properties(0).uuid) in caplog.text
