"""Hugging Face transformers: FSDP2 with bf16 products, torch.compile of each layer, fused AdamW.

Settings: ``micro`` sequences, ``experts`` implementation, ``compile``, ``recompute`` (gradient checkpoints),
``liger`` (Liger-Kernel's norms and its loss without logits), ``state``: fp32 as graphmoe has it, or bf16 for
weights, gradients and moments. ``experts=liger_cute`` is LigerCute's fused layer.
"""

import os
from types import SimpleNamespace

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from benchmarks.peers.steps import measure, read_job, tokens_of


def main() -> None:
    job = read_job()
    setting = job.setting
    torch.distributed.init_process_group("nccl" if job.on_gpu else "gloo")
    mesh = init_device_mesh(job.device.type, (job.gpus,))
    if setting["liger"]:
        patch_liger(job.config["model_type"])
    if setting["experts"] == "liger_cute":
        use_liger_cute(job, setting["micro"])
    model = build(job, setting, mesh)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    count = job.sequences // setting["micro"]

    def step() -> Tensor:
        total = torch.zeros((), device=job.device)
        for _ in range(count):
            tokens_BT = tokens_of(job, setting["micro"])
            loss = model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss / count
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        return total

    measure(job, step)
    torch.distributed.destroy_process_group()


def build(job: SimpleNamespace, setting: dict, mesh: object) -> nn.Module:
    """Return the sharded model with random weights; no rank ever has all of them."""
    config = transformers.AutoConfig.for_model(**job.config)
    dtype = torch.float32 if setting["state"] == "fp32" else torch.bfloat16
    options = {"attn_implementation": "sdpa", "experts_implementation": setting["experts"]}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    model.train()
    if setting["recompute"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if setting["compile"]:
        for layer in model.model.layers:
            layer.compile()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype)
    whole = job.gpus > 1 and job.config["num_hidden_layers"] > 12  # does not fit unsharded
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=whole)
    model.to_empty(device=job.device)
    for name, weight in model.named_parameters():
        nn.init.ones_(weight) if "norm" in name else nn.init.normal_(weight, std=config.initializer_range)
    with torch.device(job.device):  # its buffers were on the meta device
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def patch_liger(kind: str) -> None:
    from liger_kernel import transformers as liger

    # experts stay with transformers, whose implementation is a setting
    getattr(liger, f"apply_liger_kernel_to_{kind}")(swiglu=False)


def use_liger_cute(job: SimpleNamespace, micro: int) -> None:
    """Register LigerCute's fused layer as an implementation of experts, all of them on each GPU."""
    os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
    from liger_kernel.ops.configure import MoEConfig, configure
    from liger_kernel.ops.cute.ops.moe import moe_fused

    alone = [torch.distributed.new_group([rank]) for rank in range(job.gpus)][job.rank]
    config, top_k = job.config, job.config["num_experts_per_tok"]
    experts = config.get("n_routed_experts") or config["num_experts"]
    shape = MoEConfig(
        max_tokens=micro * job.seq_len, hidden_size=config["hidden_size"], num_experts=experts, top_k=top_k,
        num_hosts=1, gpus_per_host=1, group="alone", max_inflight=config["num_hidden_layers"],
    )  # fmt: skip
    configure(moe=shape, process_groups={"alone": alone}, device=job.device)

    def forward(self: nn.Module, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        gate_EFD, up_EFD = (half.contiguous() for half in self.gate_up_proj.chunk(2, dim=1))
        routed = expert_TK.int(), weight_TK.float()
        return moe_fused(x_TD, *routed, gate_EFD, up_EFD, self.down_proj, experts, top_k, alone)

    ALL_EXPERTS_FUNCTIONS["liger_cute"] = forward


if __name__ == "__main__":
    main()
