"""Capture on a GPU: replays are bitwise the uncaptured steps, never wait, and copy nothing to the host."""

from __future__ import annotations

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from runtime.capture import REPORT_FILE
from tests.gpu.sleeping import assert_host_is_back_while_the_device_sleeps
from tests.gpu.tiny import COMPILED, GPU
from tests.runs import numbers, train_in

CAPTURED = "graph.scope=full_iteration"
STEPS = (
    "train.steps=20",
    "train.val_interval=10",
    "checkpoint.interval=10",
    "train.log_interval=5",
    "optim.schedule=constant",
)


@pytest.mark.parametrize("micro_batch_size", [4, 1])
@pytest.mark.parametrize(
    "compiled, scope",
    [
        (False, "full_iteration"),
        (True, "full_iteration"),
        (True, "layer"),
        (True, "partial"),
        (True, "[embed,moe_experts,loss]"),  # units without a gradient of inputs, and twice in flight
    ],
)
def test_twenty_steps_are_bitwise_the_uncaptured_ones(
    tmp_path, deterministic_words, compiled, scope, micro_batch_size
):
    words = (
        *GPU, *deterministic_words, *STEPS, f"compile.enabled={compiled}", "model.mtp_depth=1",
        f"train.micro_batch_size={micro_batch_size}",
    )  # fmt: skip
    cut = () if scope == "full_iteration" else (f"graph.scope={scope}",)  # a scope cuts the compiled units
    plain = train_in(tmp_path / "plain", *words, *cut, "graph.warmup_steps=20")
    captured = train_in(tmp_path / "captured", *words, f"graph.scope={scope}")
    assert numbers(tmp_path / "captured") == numbers(tmp_path / "plain")
    for one, other in zip(plain.optimizer.main, captured.optimizer.main, strict=True):
        assert torch.equal(one, other)
    report = json.loads((tmp_path / "captured" / REPORT_FILE).read_text())
    assert report["on"] == "device" and report["pool_bytes"] > 0


@COMPILED
def test_a_replayed_step_never_syncs_and_copies_nothing_to_the_host(warm, compiled):
    trainer = warm(CAPTURED, compiled)
    for _ in range(2):
        trainer._train_step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            for _ in range(3):
                trainer._train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    names = [event.name for event in trace.events()]
    assert sum(name in ("cudaGraphLaunch", "hipGraphLaunch") for name in names) == 3
    waits = ("StreamSynchronize", "EventSynchronize")  # the profiler itself waits for the device
    to_host = ("DtoH", "DeviceToHost", "Device -> Host")
    assert not [name for name in names if name.endswith(waits) or any(word in name for word in to_host)]


@COMPILED
def test_the_host_is_back_while_the_device_sleeps(warm, compiled):
    trainer = warm(CAPTURED, compiled)
    for _ in range(2):
        trainer._train_step()
    assert_host_is_back_while_the_device_sleeps(trainer._train_step)


@pytest.mark.parametrize("scope", ["layer", "partial"])
def test_replayed_units_never_sync(warm, scope):
    trainer = warm("compile.enabled=true", f"graph.scope={scope}")
    for _ in range(2):
        trainer._train_step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            trainer._train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_host_is_back_from_replayed_units_while_the_device_sleeps(warm):
    few = ("model.num_layers=1", "model.num_dense_layers=0", "train.micro_batch_size=4")
    trainer = warm("compile.enabled=true", "graph.scope=layer", *few)
    for _ in range(2):
        trainer._train_step()
    assert_host_is_back_while_the_device_sleeps(trainer._train_step)


def test_the_pool_of_captured_layers_is_little_more_than_what_a_step_needs(warm):
    words = ("compile.enabled=true", "model.num_layers=8", "model.hidden_size=512")
    trainer = warm(*words)
    torch.cuda.reset_peak_memory_stats()
    lasting = torch.cuda.memory_allocated()
    trainer._train_step()
    of_a_step = torch.cuda.max_memory_allocated() - lasting
    trainer = warm(*words, "graph.scope=layer")
    trainer._train_step()
    assert 0 < trainer.execution.capture.maker.pool_bytes() < 1.25 * of_a_step


@pytest.mark.parametrize("words", [(CAPTURED,), ("compile.enabled=true", "graph.scope=layer")])
def test_a_captured_run_goes_on_bitwise_where_it_stopped(tmp_path, deterministic_words, words):
    words = (*GPU, *deterministic_words, *STEPS, *words)
    train_in(tmp_path / "whole", *words)
    train_in(tmp_path / "run", *words, "train.steps=10")
    train_in(tmp_path / "run", *words)
    assert [r for r in numbers(tmp_path / "run") if r["step"] > 10] == [
        r for r in numbers(tmp_path / "whole") if r["step"] > 10
    ]
