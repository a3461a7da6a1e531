"""Tiny random models of each family, made by transformers, and how two of them are compared."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

LIMIT = 1e-4  # norm of the difference over norm of the reference, both in fp32
KERNELS = {"attn_implementation": "eager", "experts_implementation": "eager"}  # those that take odd sizes
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class Case:
    """A configuration in transformers' words, and the lengths of the sequences it is tried with."""

    family: str
    config: dict[str, Any]
    lengths: tuple[int, ...] = (1, 13)
    vocab_size: int = 61


LATENT = ("num_attention_heads", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
LATENT += ("v_head_dim", "kv_lora_rank")
EXPERTS = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
GROUPED = ("num_attention_heads", "num_key_value_heads", "head_dim", "num_local_experts")
GROUPED += ("num_experts_per_tok", "moe_intermediate_size")


def latent(heads: int, *rest: int | None) -> dict[str, Any]:
    return dict(zip(LATENT, (heads, *rest), strict=True)) | {"num_key_value_heads": heads}


def experts(*sizes: int, dense: int, **more: Any) -> dict[str, Any]:
    """Shape of DeepSeek's MoE layers, as ``EXPERTS``, and the number of dense layers before them."""
    sized = dict(zip(EXPERTS, sizes, strict=True))
    return sized | {"first_k_dense_replace": dense, "intermediate_size": 29, **more}


def grouped(*sizes: int | None) -> dict[str, Any]:
    """Shape of grouped-query attention and of the experts of qwen3_moe and mixtral, as ``GROUPED``."""
    return dict(zip(GROUPED, sizes, strict=True)) | {"intermediate_size": sizes[-1]}


NO_GROUPS = {"n_group": 1, "topk_group": 1}
CASES = {
    "v2_plain": Case(
        "DeepseekV2",
        {"hidden_size": 33, "num_hidden_layers": 2}
        | latent(3, None, 10, 6, 14, 22)
        | experts(5, 2, 7, 1, dense=1, routed_scaling_factor=1.3, **NO_GROUPS),
    ),
    "v2_groups_q_lora_yarn": Case(
        "DeepseekV2",
        {"hidden_size": 34, "num_hidden_layers": 3}
        | latent(2, 13, 6, 8, 9, 18)
        | experts(12, 3, 11, 2, dense=2, n_group=4, topk_group=2, topk_method="group_limited_greedy")
        | {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}
        | {"routed_scaling_factor": 16.0},
        lengths=(1, 13, 70),
    ),
    "v2_yarn_without_mscale": Case(
        "DeepseekV2",
        {"hidden_size": 20, "num_hidden_layers": 4}
        | latent(5, 7, 10, 4, 3, 10)
        | experts(9, 4, 5, 3, dense=3)
        # so few turns per token that the ramp ends behind the last frequency
        | {"rope_parameters": YARN | {"factor": 3.0, "rope_theta": 10.0}, "rms_norm_eps": 1e-5},
    ),
    "v3_groups_q_lora_yarn": Case(
        "DeepseekV3",
        {"hidden_size": 31, "num_hidden_layers": 4}
        | latent(3, 9, 7, 10, 5, 15)
        | experts(16, 4, 13, 1, dense=3, n_group=4, topk_group=2)
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 2}},
        lengths=(1, 17, 70),
    ),
    "v3_moonlight": Case(
        "DeepseekV3",
        {"hidden_size": 26, "num_hidden_layers": 3, "rms_norm_eps": 1e-5}
        | latent(2, None, 12, 4, 8, 10)
        | experts(11, 3, 9, 2, dense=1, routed_scaling_factor=2.446, **NO_GROUPS)
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}},
    ),
    "v3_kimi": Case(
        "DeepseekV3",
        {"hidden_size": 35, "num_hidden_layers": 2}
        | latent(4, 11, 6, 12, 7, 13)
        | experts(13, 5, 6, 1, dense=1, routed_scaling_factor=2.827, **NO_GROUPS)
        | {"rope_parameters": YARN | {"mscale": 1.3, "mscale_all_dim": 0.6, "beta_fast": 1, "factor": 32.0}},
    ),
    "v3_two_best_of_a_group_not_renormalised": Case(
        "DeepseekV3",
        {"hidden_size": 23, "num_hidden_layers": 3, "norm_topk_prob": False}
        | latent(2, 8, 4, 6, 10, 9)
        | experts(15, 3, 7, 1, dense=2, n_group=5, topk_group=3)
        # fewer tokens of context than a rotation takes: every frequency is past the ramp
        | {"rope_parameters": YARN | {"original_max_position_embeddings": 5}},
    ),
    "v3_no_shared_experts": Case(
        "DeepseekV3",
        {"hidden_size": 18, "num_hidden_layers": 2}
        | latent(2, None, 4, 2, 6, 7)
        | experts(6, 2, 5, 0, dense=0, n_group=2, topk_group=2),
    ),
    "qwen3_renormalised": Case(
        "Qwen3Moe",
        {"hidden_size": 27, "num_hidden_layers": 2, "norm_topk_prob": True} | grouped(6, 2, 10, 7, 3, 9),
        lengths=(1, 19),
    ),
    "qwen3_one_kv_head": Case(
        "Qwen3Moe",
        {"hidden_size": 30, "num_hidden_layers": 3, "norm_topk_prob": False, "rms_norm_eps": 1e-5}
        | grouped(5, 1, 14, 5, 2, 11),
    ),
    "qwen3_yarn": Case(
        "Qwen3Moe",
        {"hidden_size": 21, "num_hidden_layers": 2, "norm_topk_prob": True}
        | grouped(3, 3, 8, 9, 4, 5)
        | {"rope_parameters": YARN | {"factor": 4.0, "rope_theta": 1e6}},
        lengths=(1, 70),
    ),
    "mixtral": Case("Mixtral", {"hidden_size": 32, "num_hidden_layers": 2} | grouped(4, 2, None, 8, 2, 15)),
    "mixtral_odd": Case(
        "Mixtral",
        {"hidden_size": 25, "num_hidden_layers": 3}
        | grouped(9, 3, 6, 3, 3, 17)
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
        lengths=(1, 23),
    ),
}
for name in ("v2_plain", "v3_no_shared_experts", "qwen3_one_kv_head", "mixtral"):
    tied = CASES[name].config | {"tie_word_embeddings": True}
    CASES[f"{name}_tied"] = Case(CASES[name].family, tied, lengths=(13,))


def random_model(case: Case, seed: int = 0) -> Any:
    """A transformers model whose every weight is random, norms and the router's bias too."""
    words = {"vocab_size": case.vocab_size, "max_position_embeddings": 2560}
    config = getattr(transformers, f"{case.family}Config")(**words | KERNELS | case.config)
    model = getattr(transformers, f"{case.family}ForCausalLM")(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.3 * noise if parameter.dim() == 1 else 0.25 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.4 * torch.rand(buffer.shape, generator=generator) - 0.2)
    return model


def tokens_of(case: Case, length: int, sequences: int = 2) -> torch.Tensor:
    """Random token ids [sequences, length]."""
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
    """Check that two sets of tensors have the same names, dtypes and bits."""
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name


def relative(actual: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """||actual - expected|| / ||expected||; ``floor`` replaces a smaller norm."""
    norm = max(float(expected.double().norm()), floor)
    error = float((actual.double() - expected.double()).norm())
    return error / norm if norm else error
