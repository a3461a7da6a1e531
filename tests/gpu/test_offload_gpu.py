"""Optimizer state in pinned host memory: the bits and the memory of steps that stream it."""

import gc

import pytest
import torch

from graphmoe.optim import offload
from graphmoe.plan.buckets import SLOTS
from graphmoe.training.memory import activations_on_host
from tests.gpu.sleeping import syncs_are_errors
from tests.gpu.tiny import COMPILED
from tests.runs import assert_same_state, decoded

KINDS = {
    "fp32": (),
    "int8": ("optim.moment_dtype=int8",),
    "in place": ("optim.moment_dtype=bf16", "optim.master_dtype=bf16"),
    "muon": ("optim.name=muon",),
}
ONE_LAYER = ("model.num_layers=1", "model.num_dense_layers=0", "train.micro_batch_size=4")


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(offload, "PIECE_ELEMENTS", 2**14)


def state_of(trainer):
    optimizer = trainer.optimizer
    found = {**decoded(optimizer.state_dict()), "weights": optimizer.weights}
    copies = {kind: found[kind] for kind in ("main", "exp_avg", "exp_avg_sq", "weights")}
    named = ((k, v.items() if isinstance(v, dict) else enumerate(v)) for k, v in copies.items())
    return {f"{kind} {name}": tensor.detach().cpu().clone() for kind, of in named for name, tensor in of}


@COMPILED
@pytest.mark.parametrize("words", KINDS.values(), ids=KINDS)
def test_streamed_updates_have_the_bits_of_updates_on_the_device(
    warm, small_pieces, deterministic_words, words, compiled
):
    words = (*words, compiled, *deterministic_words)
    states = []
    for value in ("false", "true"):
        trainer = warm(*words, f"optim.offload={value}", steps=5)
        states.append(state_of(trainer))
    assert len(trainer.optimizer._host.pieces) > 3 * SLOTS
    stored = [source for piece in trainer.optimizer._host.pieces for _, source in piece.fetches]
    assert [(x.shape, x.dtype, x.device) for x in stored if not x.is_pinned()] == []
    assert_same_state(*states)


def test_a_captured_step_streams_from_the_same_addresses(warm, small_pieces, deterministic_words):
    states = []
    for more in ((), ("optim.offload=true", "graph.scope=full_iteration", "graph.warmup_steps=2")):
        trainer = warm("compile.enabled=true", *deterministic_words, *more, steps=4)
        for void in (1.0, 0.0, 0.0):
            trainer.optimizer.void.fill_(void)  # 1.0: the step changes nothing
            trainer._train_step()
        states.append(state_of(trainer))
    assert trainer.execution.capture.ready
    assert_same_state(*states)


@COMPILED
def test_a_streamed_step_never_waits_for_the_device(warm, small_pieces, compiled):
    trainer = warm(compiled, *ONE_LAYER, "optim.offload=true", steps=5)
    with syncs_are_errors():
        trainer._train_step()


def test_the_device_holds_less_by_the_bytes_of_the_state(warm):
    sizes = ("model.hidden_size=512", "model.expert_ffn_size=1024", "model.num_layers=4", "optim.bucket_mb=1")
    peaks = []
    for value in ("false", "true"):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        trainer = warm("compile.enabled=true", *sizes, f"optim.offload={value}", steps=3)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        families = trainer.optimizer.families
        state = [t for f in families for t in (f.main, *f.moments.values(), *f.rows.values())]
        moved = sum(tensor.nbytes for tensor in state)
        slots = sum(slot.nbytes for slot in trainer.optimizer.slots)
    assert moved > 2 * slots > 0
    assert peaks[0] - peaks[1] == pytest.approx(moved - slots, rel=0.05)


STORED = "recompute.offload=[attn,mlp,moe_router,shared_experts,moe_experts]"


@COMPILED
def test_stored_activations_give_the_bits_of_those_on_the_device(warm, deterministic_words, compiled):
    words = (compiled, "model.num_layers=4", "train.micro_batch_size=2", *deterministic_words)
    assert_same_state(*(state_of(warm(*words, *more, steps=5)) for more in ((), (STORED,))))


def test_the_peak_is_lower_by_the_activations_of_all_but_two_layers(warm):
    sizes = ("model.num_layers=12", "model.hidden_size=512", "model.context_length=2048", "data.seq_len=2048")
    peaks, lasting = [], []
    for more in ((), ("recompute.offload=[attn,moe_experts]",)):
        trainer = warm("compile.enabled=true", *sizes, "train.micro_batch_size=4", *more, steps=2)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer._train_step()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        lasting.append(trainer.plan)
    per_layer = activations_on_host(lasting[1], on_nvidia=True)[0] / 12
    assert peaks[0] - peaks[1] == pytest.approx(10 * per_layer, rel=0.15)
