"""The facts that compiled code depends on, and how they are told apart."""

import copy
import dataclasses
import enum
import functools
import sys
import typing

import pytest
import torch

from graphmoe.config.schema import RunConfig
from graphmoe.passes import PASSES, select_passes
from graphmoe.passes.base import PassSpec
from graphmoe.plan.rules import resolve
from graphmoe.runtime.cache import key as cache_key
from graphmoe.runtime.cache.key import base_of, differences, facts_of, key_of, may_share
from tests.runs import config

CPU = torch.device("cpu")
OTHERWISE = "passes.enabled passes.disabled passes.extra run.device host.threads moe.dispatch_dtype"
"""Keys that are facts by what they make of the passes, or by what the process sees."""
NO_FACTS = """
    run.name run.auto model.name model.init_std model.bias_update_rate model.peak_lr
    data.source data.seed data.paths data.weights data.val_paths data.val_fraction data.text_field
    data.tokenizer data.eod_token data.bpe_vocab_size data.cache_dir data.hf_name data.hf_config data.hf_split
    data.hf_val_split data.shuffle data.skip_bad data.prefetch data.document_length optim.momentum
    data.chat_template data.train_on data.too_long checkpoint.export
    optim.lr optim.min_lr_ratio optim.warmup_steps optim.wsd_decay_fraction optim.beta1 optim.beta2 optim.eps
    optim.weight_decay optim.bucket_mb optim.grad_shard parallel.dp parallel.dp_shard_size parallel.pp
    train.steps train.tokens train.epochs train.global_batch_size train.seed train.clip_grad_norm
    train.val_interval train.val_batches train.max_nonfinite train.log_interval train.rerun train.spike_factor
    train.inject_fault moe.sync_free_stage
    compile.enabled compile.cache compile.cache_dir compile.cache_shared passes.dump graph.warmup_steps
    checkpoint.enabled checkpoint.interval checkpoint.keep_last checkpoint.keep_every checkpoint.async_save
    checkpoint.mirror checkpoint.replica_check
    checkpoint.resume checkpoint.resume_from checkpoint.init_from checkpoint.other_tokenizer
    train.max_hours
    host.manual_gc host.gc_interval host.numa host.kernarg_pool_mb host.max_hw_queues host.nvlink_multicast
    host.env launch.nproc launch.nodes launch.endpoint launch.max_restarts launch.gpus_per_job
    launch.write_only launch.hang_timeout_s launch.fake_world launch.fake_rank launch.fake_memory_gb
    sweep.resume log.tensorboard log.report log.wandb log.wandb_project log.mlflow log.mlflow_experiment
    model.hf_family log.progress log.peak_tflops
    log.sample_tokens log.sample_prompt format pipeline.schedule pipeline.virtual_stages pipeline.microbatches
    pipeline.layout pipeline.costs profile.pipeline profile.steps profile.ranks
"""
"""Keys that are none. A key that is not here must be a fact."""


def every_key() -> list[str]:
    kinds = typing.get_type_hints(RunConfig).items()
    sections = {name: dataclasses.fields(kind) for name, kind in kinds if dataclasses.is_dataclass(kind)}
    return [*(f"{name}.{key.name}" for name, keys in sections.items() for key in keys), "format"]


@functools.cache
def resolved(*words: str) -> RunConfig:
    return resolve(config(*words))


def facts(run_config: RunConfig | None = None, **knobs) -> dict:
    run_config = run_config or resolved()
    return facts_of(run_config, select_passes(run_config.passes, knobs), CPU)


def another(value):
    if isinstance(value, enum.Enum):
        return next(choice for choice in type(value) if choice is not value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, list):
        return [*value, "mlp"]
    return {**value, "NCCL_DEBUG": "INFO"} if isinstance(value, dict) else "layer"


def changed(key: str) -> RunConfig:
    run_config = copy.deepcopy(resolved())
    section, _, name = key.rpartition(".")
    owner = getattr(run_config, section) if section else run_config
    setattr(owner, name, another(getattr(owner, name)))
    return run_config


UNLISTED = [key for key in every_key() if key not in f"{OTHERWISE} {NO_FACTS}".split()]


@pytest.mark.parametrize("key", UNLISTED)
def test_another_value_of_a_fact_gives_another_key_and_is_named(key):
    before, now = facts(), facts(changed(key))
    assert key_of(before) != key_of(now)
    (line,) = differences(now, before)
    assert line.startswith(f"{key} changed: ")


def test_a_key_that_is_no_fact_leaves_the_cache_key_as_it_is():
    before = facts()
    assert [name for name in NO_FACTS.split() if facts(changed(name)) != before] == []
    assert {*OTHERWISE.split(), *NO_FACTS.split()} < {*every_key()}
    forced = (facts(resolved(f"moe.expert_load={load}")) for load in ("burst", "hot_rank"))
    assert next(forced) == next(forced) != before


def test_other_knobs_of_a_pass_give_another_key_and_the_same_ones_the_same():
    one, other = facts(fuse_experts={"backend": "torch"}), facts(fuse_experts={"backend": "triton"})
    assert key_of(one) != key_of(other) and may_share(one, other)
    assert differences(one, other) == ["the pass fuse_experts changed"]
    assert key_of(one) == key_of(facts(fuse_experts={"backend": "torch"}))


def test_code_is_shared_with_a_run_without_an_extra_pass_but_not_with_another_version_of_it():
    def extra(graph) -> int:
        return 0

    def with_extra(**knobs) -> dict:
        spec = PassSpec("mine", extra, "forward", "bitwise", knobs=knobs)
        return facts_of(resolved(), [*PASSES, spec], CPU)

    assert may_share(with_extra(), facts()) and may_share(facts(), with_extra())
    assert not may_share(with_extra(width=1), with_extra(width=2))
    assert differences(with_extra(width=1), with_extra(width=2)) == ["the pass mine changed"]


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (["torch"], "torch changed: before -> now"),
        (["threads"], "threads changed: before -> now"),
        (["cpu_instructions"], "the CPU's instructions changed"),
        (["sources.graphmoe/ops"], "sources of graphmoe/ops changed"),
        ([f"sources.graphmoe/{name}" for name in ("ops", "model", "optim")], "sources of 3 folders changed"),
    ],
)
def test_another_base_shares_nothing_and_is_named(names, line):
    names = [f"base.{name}" for name in names]
    now, before = (facts() | dict.fromkeys(names, value) for value in ("now", "before"))
    assert differences(now, before) == [line]
    assert not may_share(now, before) and base_of(now) != base_of(before)
    assert not may_share(now, {key: value for key, value in now.items() if key not in names})


def test_a_changed_new_or_renamed_source_changes_the_hash_of_its_folder_only(tmp_path, monkeypatch):
    root = tmp_path / "graphmoe"
    for name in ("a.py", "ops/deep/b.py", "passes/c.py", "runtime/d.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x = 1\n")
    monkeypatch.setattr(sys.modules["graphmoe"], "__path__", [str(root)])

    def changed_by(act) -> list[str]:
        before = cache_key.source_hashes.__wrapped__()
        act()
        after = cache_key.source_hashes.__wrapped__()
        return sorted(name for name in before | after if before.get(name) != after.get(name))

    deep = root / "ops/deep"
    assert changed_by(lambda: (deep / "b.py").write_text("x = 2\n")) == ["graphmoe/ops/deep"]
    assert changed_by(lambda: (deep / "b.py").rename(deep / "e.py")) == ["graphmoe/ops/deep"]
    assert changed_by(lambda: (root / "runtime/f.py").write_text("")) == ["graphmoe/runtime"]
    moved = ["graphmoe/ops/deep", "graphmoe/passes/deep"]
    assert changed_by(lambda: deep.rename(root / "passes/deep")) == moved
