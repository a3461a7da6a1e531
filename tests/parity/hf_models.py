"""Tiny random models of each family, made by transformers, and how two of them are compared."""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

KERNELS = {"attn_implementation": "eager", "experts_implementation": "eager"}  # those that take odd sizes
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class Case:
    """A configuration in transformers' words, and the lengths of the sequences it is tried with."""

    family: str
    config: dict[str, Any]
    lengths: tuple[int, ...] = (1, 13)
    vocab_size: int = 61


SHAPE = ("hidden_size", "num_hidden_layers")
LATENT = ("num_attention_heads", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
LATENT += ("v_head_dim", "kv_lora_rank")
EXPERTS = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
EXPERTS += ("first_k_dense_replace",)
GROUPED = ("num_attention_heads", "num_key_value_heads", "head_dim", "num_local_experts")
GROUPED += ("num_experts_per_tok", "moe_intermediate_size")
Sizes = tuple[int | None, ...]


def deepseek(
    version: int, shape: Sizes, latent: Sizes, experts: Sizes, lengths: tuple[int, ...] = (1, 13), **more: Any
) -> Case:
    """``shape``: width and layers; latent attention as ``LATENT``, MoE layers as ``EXPERTS``."""
    sized = zip(SHAPE + LATENT + EXPERTS, shape + latent + experts, strict=True)
    config = dict(sized) | {"num_key_value_heads": latent[0], "intermediate_size": 29} | more
    return Case(f"DeepseekV{version}", config, lengths)


def grouped(family: str, shape: Sizes, sizes: Sizes, lengths: tuple[int, ...] = (1, 13), **more: Any) -> Case:
    """``sizes``: grouped-query attention and experts, as ``GROUPED``."""
    sized = zip(SHAPE + GROUPED, shape + sizes, strict=True)
    return Case(family, dict(sized) | {"intermediate_size": sizes[-1]} | more, lengths)


def sigmoid(
    family: str,
    shape: Sizes,
    sizes: Sizes,
    shared: int,
    dense_layers: int,
    lengths: tuple[int, ...] = (1, 19),
    **more: Any,
) -> Case:
    """``sizes``: as ``GROUPED``; DeepSeek-V3's router, shared experts and leading dense layers."""
    case = grouped(family, shape, sizes, lengths, first_k_dense_replace=dense_layers, attention_bias=True)
    experts = {"n_shared_experts": shared, "n_routed_experts": case.config.pop("num_local_experts")}
    return replace(case, config=case.config | experts | {"intermediate_size": 27} | more)


def dense(family: str, seed: int, **more: Any) -> Case:
    """A dense model of random sizes: a head is not as wide as the width over the number of heads."""
    draw = random.Random(seed).randint
    groups, size = draw(1, 3), 2 * draw(2, 8)
    heads = groups * draw(2, 3)
    config = {
        "hidden_size": heads * draw(5, 9), "num_hidden_layers": draw(2, 3), "num_attention_heads": heads,
        "num_key_value_heads": groups, "head_dim": size, "intermediate_size": draw(5, 40),
    }  # fmt: skip
    return Case(family, config | more, (1, draw(9, 33)))


def gpt_oss(
    shape: Sizes, heads: Sizes, experts: Sizes, lengths: tuple[int, ...] = (1, 19), **more: Any
) -> Case:
    """``heads``: heads, key-value heads and head size; ``experts``: number, top k and width."""
    keys = (*GROUPED[:5], "intermediate_size")
    sized = dict(zip(SHAPE + keys, shape + heads + experts, strict=True))
    return Case("GptOss", sized | {"sliding_window": 5} | more, lengths)


def llama4(
    shape: Sizes, heads: Sizes, experts: Sizes, lengths: tuple[int, ...] = (1, 19), **more: Any
) -> Case:
    """``heads``: as of `gpt_oss`; ``experts``: number, and widths of experts and dense MLPs."""
    keys = (*GROUPED[:4], "intermediate_size", "intermediate_size_mlp")
    chunk = {"attention_chunk_size": 7, "floor_scale": 6}
    return Case(
        "Llama4", dict(zip(SHAPE + keys, shape + heads + experts, strict=True)) | chunk | more, lengths
    )


def qwen3_next(
    shape: Sizes, sizes: Sizes, linear: Sizes, shared: int, lengths: tuple[int, ...] = (1, 19), **more: Any
) -> Case:
    """``sizes``: as ``GROUPED``; ``linear``: key heads, value heads, head sizes, taps."""
    case = grouped("Qwen3Next", shape, sizes, lengths)
    keys = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    sized = dict(zip((*keys, "linear_conv_kernel_dim"), linear, strict=True))
    experts = {"num_experts": case.config.pop("num_local_experts")}
    return replace(
        case, config=case.config | sized | experts | {"shared_expert_intermediate_size": shared} | more
    )


def qwen3_5(*sizes: Any, **more: Any) -> Case:
    case = qwen3_next(*sizes, **more)
    del case.config["intermediate_size"]
    return replace(case, family="Qwen3_5Moe")


def layers(*kinds: str) -> dict[str, list[str]]:
    return {"layer_types": [f"{kind}_attention" for kind in kinds]}


def groups(number: int, chosen: int) -> dict[str, int]:
    return {"n_group": number, "topk_group": chosen}


def yarn(**more: float) -> dict[str, Any]:
    return {"rope_parameters": YARN | more}


def llama3(theta: float, *sizes: float) -> dict[str, Any]:
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    rope = {"rope_type": "llama3", "rope_theta": theta} | dict(zip(keys, sizes, strict=True))
    return {"rope_parameters": rope}


def part(fraction: float, theta: float) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": fraction}
    return {"rope_parameters": rope}


def default_rope(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


CASES = {
    "v2_plain": deepseek(
        2, (33, 2), (3, None, 10, 6, 14, 22), (5, 2, 7, 1, 1), routed_scaling_factor=1.3, **groups(1, 1)
    ),
    "v2_groups_q_lora_yarn": deepseek(
        2, (34, 3), (2, 13, 6, 8, 9, 18), (12, 3, 11, 2, 2), (1, 13, 70), routed_scaling_factor=16.0,
        topk_method="group_limited_greedy", **groups(4, 2), **yarn(mscale=0.707, mscale_all_dim=0.707),
    ),
    "v2_yarn_without_mscale": deepseek(  # so few turns per token that the ramp ends behind the last frequency
        2, (20, 4), (5, 7, 10, 4, 3, 10), (9, 4, 5, 3, 3), rms_norm_eps=1e-5,
        **yarn(factor=3.0, rope_theta=10.0),
    ),
    "v3_groups_q_lora_yarn": deepseek(
        3, (31, 4), (3, 9, 7, 10, 5, 15), (16, 4, 13, 1, 3), (1, 17, 70), **groups(4, 2),
        **yarn(mscale=1.0, mscale_all_dim=1.0, beta_fast=16, beta_slow=2),
    ),
    "v3_moonlight": deepseek(
        3, (26, 3), (2, None, 12, 4, 8, 10), (11, 3, 9, 2, 1), rms_norm_eps=1e-5, routed_scaling_factor=2.446,
        **groups(1, 1), **default_rope(50000.0),
    ),
    "v3_kimi": deepseek(
        3, (35, 2), (4, 11, 6, 12, 7, 13), (13, 5, 6, 1, 1), routed_scaling_factor=2.827, **groups(1, 1),
        **yarn(mscale=1.3, mscale_all_dim=0.6, beta_fast=1, factor=32.0),
    ),
    # fewer tokens of context than a rotation takes: every frequency is past the ramp
    "v3_two_best_of_a_group_not_renormalised": deepseek(
        3, (23, 3), (2, 8, 4, 6, 10, 9), (15, 3, 7, 1, 2), norm_topk_prob=False, **groups(5, 3),
        **yarn(original_max_position_embeddings=5),
    ),
    "v3_no_shared_experts": deepseek(3, (18, 2), (2, None, 4, 2, 6, 7), (6, 2, 5, 0, 0), **groups(2, 2)),
    "qwen3_renormalised": grouped(
        "Qwen3Moe", (27, 2), (6, 2, 10, 7, 3, 9), (1, 19), norm_topk_prob=True
    ),
    "qwen3_one_kv_head": grouped(
        "Qwen3Moe", (30, 3), (5, 1, 14, 5, 2, 11), norm_topk_prob=False, rms_norm_eps=1e-5
    ),
    "qwen3_yarn": grouped(
        "Qwen3Moe", (21, 2), (3, 3, 8, 9, 4, 5), (1, 70), norm_topk_prob=True,
        **yarn(factor=4.0, rope_theta=1e6),
    ),
    "llama": dense("Llama", 16, rms_norm_eps=1e-5, **default_rope(5e5)),
    "llama_scaled": dense("Llama", 27, **llama3(100.0, 8.0, 1.0, 4.0, 16)),
    "llama_scaled_one_kv_head": dense("Llama", 9, num_key_value_heads=1, **llama3(50.0, 3.5, 0.5, 2.5, 9)),
    "llama_head_of_the_width": Case("Llama", {
        "hidden_size": 30, "num_hidden_layers": 2, "num_attention_heads": 5, "num_key_value_heads": 5,
        "intermediate_size": 13,
    }),
    "qwen3_dense": dense("Qwen3", 23, rms_norm_eps=1e-5, **default_rope(1e6)),
    "qwen3_dense_one_kv_head": dense("Qwen3", 30, num_key_value_heads=1),
    "qwen3_dense_yarn": dense("Qwen3", 38, **yarn(factor=4.0, rope_theta=1e6)),
    "glm_air": sigmoid(
        "Glm4Moe", (33, 3), (6, 2, 12, 9, 3, 7), 1, 1, **groups(1, 1), **part(0.5, 1e6)
    ),
    "glm_qk_norm_scaled": sigmoid(
        "Glm4Moe", (26, 4), (9, 3, 10, 8, 4, 11), 2, 3, (1, 23), use_qk_norm=True,
        routed_scaling_factor=2.5, rms_norm_eps=1e-6, **groups(1, 1), **part(0.6, 1e4),
    ),
    "glm_groups": sigmoid(
        "Glm4Moe", (19, 2), (5, 1, 8, 12, 4, 6), 1, 0, norm_topk_prob=False, **groups(4, 2),
        **part(0.25, 300.0),
    ),
    "glm_yarn": sigmoid(
        "Glm4Moe", (21, 2), (4, 4, 16, 5, 2, 5), 1, 1, (1, 70), **groups(1, 1),
        **yarn(factor=4.0, partial_rotary_factor=0.5),
    ),
    "minimax": grouped("MiniMaxM2", (33, 2), (6, 2, 12, 9, 3, 7), (1, 19), rotary_dim=6),
    "minimax_odd": grouped(
        "MiniMaxM2", (21, 3), (5, 1, 14, 7, 4, 9), (1, 23), rms_norm_eps=1e-5, **part(6 / 14, 500.0)
    ),
    "gpt_oss": gpt_oss((33, 3), (6, 2, 10), (7, 3, 13), (1, 19, 70)),
    "gpt_oss_clamped_full_every_third": gpt_oss(
        (22, 4), (5, 5, 6), (5, 2, 9), swiglu_limit=0.4, rms_norm_eps=1e-6,
        **layers("sliding", "sliding", "full", "sliding"), **default_rope(777.0),
    ),
    "gpt_oss_without_biases_or_windows": gpt_oss(
        (27, 2), (3, 1, 8), (4, 4, 11), swiglu_limit=1.5, attention_bias=False, **layers("full", "full"),
        **yarn(factor=4.0, beta_fast=2.0),
    ),
    "llama4_scout": llama4(
        (33, 4), (6, 2, 10), (7, 13, 9), (1, 7, 19, 41), **llama3(100.0, 8.0, 1.0, 4.0, 16)
    ),
    "llama4_maverick": llama4(
        (26, 5), (4, 4, 6), (9, 11, 21), (6, 23), use_qk_norm=False, interleave_moe_layer_step=2,
        no_rope_layer_interval=2, attn_scale=0.7, **default_rope(500.0),
    ),
    "llama4_untuned_every_third": llama4(
        (21, 6), (5, 1, 14), (5, 7, 17), attn_temperature_tuning=False, interleave_moe_layer_step=3,
        no_rope_layer_interval=3, rms_norm_eps=1e-6, attention_chunk_size=4,
    ),
    "llama4_rotary_everywhere": llama4(
        (18, 2), (3, 3, 8), (4, 6, 5), no_rope_layers=[1, 1], attention_chunk_size=4000,
    ),
    "qwen3_next": qwen3_next(
        (33, 4), (6, 2, 16, 7, 3, 9), (2, 4, 16, 32, 4), 13, (1, 70), **layers(*("linear", "full") * 2)
    ),
    "qwen3_next_every_third": qwen3_next(
        (22, 4), (3, 1, 10, 5, 2, 11), (1, 3, 32, 16, 3), 6, norm_topk_prob=False, rms_norm_eps=1e-5,
        **layers("linear", "linear", "full", "linear"), **part(0.4, 777.0),
    ),
    "qwen3_5": qwen3_5(
        (26, 4), (4, 2, 16, 6, 2, 10), (2, 6, 16, 32, 4), 9, (1, 66), **layers(*("linear", "full") * 2)
    ),
    "mixtral": grouped("Mixtral", (32, 2), (4, 2, None, 8, 2, 15)),
    "mixtral_odd": grouped("Mixtral", (25, 3), (9, 3, 6, 3, 3, 17), (1, 23), **default_rope(777.0)),
}  # fmt: skip
for name in (
    "v2_plain",
    "v3_no_shared_experts",
    "glm_air",
    "minimax",
    "qwen3_one_kv_head",
    "qwen3_next",
    "qwen3_5",
    "mixtral",
    "llama_scaled",
    "qwen3_dense",
    "gpt_oss",
    "llama4_scout",
):
    tied = CASES[name].config | {"tie_word_embeddings": True}
    CASES[f"{name}_tied"] = Case(CASES[name].family, tied, lengths=(13,))


def random_model(case: Case, seed: int = 0) -> Any:
    """A transformers model whose every weight is random, norms and the router's bias too."""
    words = {"vocab_size": case.vocab_size, "max_position_embeddings": 2560}
    own = "Text" if case.family in ("Llama4", "Qwen3_5Moe") else ""
    config = getattr(transformers, f"{case.family}{own}Config")(**words | KERNELS | case.config)
    model = getattr(transformers, f"{case.family}ForCausalLM")(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # norms in bf16, so that 1 can be added to them, and subtracted, without loss
            parameter.copy_((1.0 + 0.3 * noise).bfloat16() if parameter.dim() == 1 else 0.25 * noise)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # transformers subtracts sums of decays, and loses strong ones
                parameter -= 3
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.4 * torch.rand(buffer.shape, generator=generator) - 0.2)
    return model


VISION = {
    "Llama4": {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
        "vision_output_dim": 8, "projector_input_dim": 8, "projector_output_dim": 8, "image_size": 28,
    },
    "Qwen3_5Moe": {
        "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 12, "out_hidden_size": 26,
        "patch_size": 2, "num_position_embeddings": 4,
    },
}  # fmt: skip
"""Vision models of published folders, small."""


def multimodal(folder: Path, text: Any) -> Any:
    """Write the whole model that transformers has around a text model, and return it."""
    family = type(text).__name__.removesuffix("ForCausalLM")
    tied = {"tie_word_embeddings": text.config.tie_word_embeddings}
    config = getattr(transformers, f"{family}Config")(
        text_config=text.config.to_dict() | KERNELS, vision_config=VISION[family], **tied, **KERNELS
    )
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    if family == "Llama4":
        model.language_model.load_state_dict(text.state_dict())
    else:
        model.model.language_model.load_state_dict(text.model.state_dict())
        model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.to(text.dtype).save_pretrained(folder)
    return model


def tokens_of(case: Case, length: int, sequences: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(case.vocab_size, (sequences, length), generator=generator)


def reload(folder: Path) -> Any:
    """The model that transformers reads from a folder, and what it says was wrong with the tensors."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **KERNELS
    )


def tensors_in(folder: Path, stem: str = "model") -> dict[str, torch.Tensor]:
    files = [load_file(path) for path in sorted(folder.glob(f"{stem}*.safetensors"))]
    return {name: tensor for file in files for name, tensor in file.items()}


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name
