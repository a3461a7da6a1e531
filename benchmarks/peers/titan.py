"""TorchTitan 0.3.0: its trainer and its model with layers removed, cuDNN attention, and random tokens.

Settings: ``micro`` sequences, ``ep`` dispatcher (none: FSDP2 alone), ``recompute`` of all, ``compile``,
``graph`` (CUDA graph of forward and backward), ``state``: fp32 as graphmoe has it, or bf16 for weights,
gradients and moments. It wants a later torch than 2.11, so three things that it lacks are replaced here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
from torch import Tensor, nn

if NEEDS_NAME := not hasattr(fsdp, "DataParallelMeshDims"):
    fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})
if not hasattr(torch.compiler, "_is_non_strict_tracing"):
    torch.compiler._is_non_strict_tracing = lambda: False

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.config.override import OverrideConfig  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC  # noqa: E402
from torchtitan.models import deepseek_v3, qwen3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from benchmarks.peers.steps import measure, read_job, tokens_of  # noqa: E402

FUSED = [f"torchtitan.overrides.fused_swiglu.{name}" for name in ("fused_swiglu", "fused_grouped_experts")]
JOB = read_job()


class RandomTokens(BaseDataLoader):
    """Batches of random tokens, on the device from the start, without positions: whole sequences."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, local_batch_size: int, **_: Any) -> None:
        self.sequences = local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            tokens_BT = tokens_of(JOB, self.sequences, 1)
            yield {"input": tokens_BT[:, :-1].contiguous()}, tokens_BT[:, 1:].contiguous()

    state_dict = load_state_dict = lambda *_: {}


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    __init__ = encode = decode = get_vocab_size = lambda *_, **__: None


def main() -> None:
    if NEEDS_NAME:
        deepseek_v3.mtp.apply_fsdp_to_decoder = qwen3.parallelize.apply_fsdp_to_decoder = shard
    trainer = config_of(JOB).build()
    batches, losses = trainer.batch_generator(trainer.dataloader), [float("nan")]
    trainer.metrics_processor.log = lambda _, loss, *__, **___: losses.append(loss)  # of steps 1, 10, 20

    def step() -> float:
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(batches)
        return losses[-1]

    measure(JOB, step)
    trainer.close()
    torch.distributed.destroy_process_group()


def config_of(job: SimpleNamespace) -> Trainer.Config:
    setting, has_ep = job.setting, job.setting["ep"] != "none"
    module, flavor = (deepseek_v3, "16B") if "kv_lora_rank" in job.config else (qwen3, "30B-A3B")
    backend = setting["ep"] if has_ep else "standard"
    spec = module.model_registry(flavor, attn_backend="varlen", moe_comm_backend=backend)
    spec.model.layers = spec.model.layers[: job.config["num_hidden_layers"]]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        if layer.moe is not None:
            layer.moe.load_balance_coeff = None  # routing stays natural
    loss = CrossEntropyLoss.Config(global_vocab_size=job.config["vocab_size"])
    return Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(loss_fn=loss),
        tokenizer=NoTokenizer.Config(),
        dataloader=RandomTokens.Config(),
        optimizer=default_adamw(lr=1e-6),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1, min_lr_factor=1.0),
        training=TrainingConfig(
            local_batch_size=setting["micro"],
            global_batch_size=job.sequences * job.gpus,
            seq_len=job.seq_len,
            steps=job.steps,
            dtype="float32" if setting["state"] == "fp32" else "bfloat16",
            disable_cuda_graphs=not setting["graph"],
        ),
        parallelism=ParallelismConfig(
            expert_parallel_degree=job.gpus if has_ep else 1,
            spmd_backend="partial_dtensor",
            fsdp_reshard_after_forward="always" if len(spec.model.layers) > 12 else "never",
        ),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=FullAC.Config() if setting["recompute"] else None,
        compile=CompileConfig(enable=setting["compile"]),
        override=OverrideConfig(imports=FUSED if job.on_gpu else []),
    )


def shard(
    model: nn.Module,
    dp_mesh: Any,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    ep_degree: int = 1,
    edp_mesh: Any = None,
    reshard_after_forward_policy: str = "default",
    **_: Any,
) -> None:
    """Shard as TorchTitan does, with experts as modules of their own: torch 2.11 has one mesh a module."""
    policy = fsdp.MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False)
    options = {"mp_policy": policy, "reshard_after_forward": reshard_after_forward_policy != "never"}
    for layer in model.layers.values():
        if ep_degree > 1 and layer.moe_enabled:
            fsdp.fully_shard(layer.moe.routed_experts.inner_experts, mesh=edp_mesh, **options)
        fsdp.fully_shard(layer, mesh=dp_mesh, **options)
    fsdp.fully_shard(model.tok_embeddings, mesh=dp_mesh, **options)
    fsdp.fully_shard(model.lm_head, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=False)
    fsdp.fully_shard(model, mesh=dp_mesh, **options)
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss is over all tokens already


if __name__ == "__main__":
    main()
