"""The memory that a dry run reports is what the allocator of a GPU gives out at most."""

import gc

import pytest
import torch

from graphmoe.training.dry_run import dry_run
from tests.gpu.tiny import COMPILED, GPU, UNREAD
from tests.runs import config, trainer_in

LARGE = (
    *GPU, *UNREAD, "model.hidden_size=1024", "model.vocab_size=32768", "model.num_layers=4",
    "model.num_heads=8", "model.qk_nope_head_dim=64", "model.qk_rope_head_dim=64", "model.v_head_dim=128",
    "model.dense_ffn_size=2048", "model.expert_ffn_size=512", "model.shared_ffn_size=512",
    "model.context_length=2048", "data.source=synthetic", "train.micro_batch_size=4",
    "train.global_batch_size=4",
)  # fmt: skip


@COMPILED
def test_the_peak_is_that_of_a_real_step(tmp_path, compiled):
    expected = dry_run(config(*LARGE, compiled, "launch.fake_world=1"))["memory"]
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    trainer = trainer_in(tmp_path, *LARGE, compiled)
    for _ in range(2):  # kernels are compiled and measured
        trainer._train_step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    trainer._train_step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    trainer.loader.close()
    # Workspaces of matrix products, which the dry run does not count, are tens of MiB of each.
    assert held == pytest.approx(sum(expected["state_bytes"].values()), rel=0.02, abs=2**27)
    # What a compiler joins needs no memory of its own, so a compiled step may need less.
    assert 0.8 * expected["peak_bytes"] < peak < 1.05 * expected["peak_bytes"] + 2**27, (peak, expected)
