"""Rules of LoRA adapters: their targets, and what cannot run with frozen weights."""

from collections.abc import Iterator

from graphmoe.config.choices import LORA_TARGETS
from graphmoe.config.schema import DpShard, Fp8Recipe, RunConfig
from graphmoe.plan.attention import attention_facts
from graphmoe.plan.experts import adapted_of


def lora_rules(config: RunConfig) -> Iterator[str]:
    model, parallel, precision = config.model, config.parallel, config.precision.fp8
    rank, targets = f"model.lora_rank={model.lora_rank}", f"[{','.join(model.lora_targets)}]"
    if unknown := [name for name in model.lora_targets if name not in LORA_TARGETS]:
        yield f"model.lora_targets={targets} has {unknown[0]}; use names out of {', '.join(LORA_TARGETS)}"
    if not model.lora_rank:
        return
    there = {name for i in range(model.num_layers + model.mtp_depth) for name in adapted_of(model, i)}
    if not there and not unknown:
        yield (
            f"model.lora_targets={targets} names no matrix of this model, and {rank} freezes all others; use "
            f"model.lora_targets=[attention]"
        )
    off = "or model.lora_rank=0, which trains all weights"
    if config.optim.name == "muon":
        yield f"optim.name=muon updates whole matrices, not adapters of {rank}; use optim.name=adamw, {off}"
    if precision is not Fp8Recipe.none:
        yield (
            f"precision.fp8={precision.value} quantizes weights that train, and {rank} freezes them; use "
            f"precision.fp8=none, {off}"
        )
    if parallel.dp_shard is DpShard.fsdp2:
        yield (
            f"parallel.dp_shard=fsdp2 shards weights that train, and {rank} freezes all but adapters; use "
            f"parallel.dp_shard=zero1, {off}"
        )
    if "experts" in there and parallel.etp > 1:
        yield (
            f"parallel.etp={parallel.etp} splits experts, and model.lora_targets={targets} adapts whole; "
            f"use parallel.etp=1 with more of parallel.ep, or leave experts out of model.lora_targets"
        )
    if "attention" in there and parallel.cp > 1 and attention_facts(model).latents is not None:
        yield (
            f"parallel.cp={parallel.cp} computes keys and values of a rank's heads by rows of a matrix; "
            f"model.lora_targets={targets} adapts it whole; use parallel.cp=1, or leave attention out"
        )
