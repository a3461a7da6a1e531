"""LoRA adapters as folders that peft reads with transformers 5, or merged into the weights."""

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphmoe.checkpoint.hf.family import Family
from graphmoe.checkpoint.hf.pieces import pieces
from graphmoe.checkpoint.hf.tensor_files import WHOLE, Index, TensorToWrite, write_shards
from graphmoe.config.schema import ConfigError, ModelConfig
from graphmoe.plan.experts import has_experts

Read = Callable[[str, Index], Tensor]
STEM, CONFIG = "adapter_model", "adapter_config.json"
_DENSE_MLP = (".gate_proj", ".up_proj", ".down_proj")


def adapters_of(name: str) -> tuple[str, str]:
    """Return the names of A and B of a weight's adapter, if it has one."""
    stem, _, last = name.rpartition(".")
    of_experts = last.removeprefix("w") if last.startswith("w_") else ""
    return f"{stem}.lora_A{of_experts}", f"{stem}.lora_B{of_experts}"


def merged(config: ModelConfig, names: Mapping[str, Any], read: Read) -> Read:
    """Return ``read`` of W + lora_alpha / lora_rank * B A, computed in fp32; ``names`` has all tensors."""

    def read_merged(name: str, index: Index) -> Tensor:
        a, b = adapters_of(name)
        weight = read(name, index)
        if a not in names:
            return weight
        # the first index of experts is an expert's, of B's rows otherwise
        low = read(a, index[:1] if name.rpartition(".")[2].startswith("w_") else WHOLE)
        return weight.float() + read(b, index).float() @ low.float() * (config.lora_alpha / config.lora_rank)

    return read_merged


def adapter_entries(
    family: Family, config: ModelConfig, shapes: Mapping[str, torch.Size], dtypes: Mapping[str, torch.dtype],
    read: Read,
) -> Iterator[TensorToWrite]:  # fmt: skip
    """Yield the tensors of a PEFT folder; ``shapes`` of adapters. MTP layers are left out.

    *Raises* ConfigError for matrices whose adapters peft cannot store.
    """
    for piece in pieces(family, config, fused=True):
        names = adapters_of(piece.ours)
        if names[0] not in shapes or piece.ours.startswith("mtp."):
            continue
        module, is_routed = piece.theirs.removesuffix(".weight"), ".experts." in piece.theirs
        if piece.form is not None or piece.rows is not None:
            raise ConfigError(
                f"{family.name} stores {piece.theirs} in another form, without such an adapter in peft; use "
                f"target=hf, which merges adapters into the weights"
            )
        if module.endswith(_DENSE_MLP) and has_experts(config) and not is_routed:
            raise ConfigError(
                f"peft reads an adapter of {module} as one of routed experts; use target=hf, which merges "
                f"adapters into the weights, or train with model.lora_targets of attention and experts"
            )
        if is_routed:
            # of a module's two parameters, the later one's adapter wraps the other's (peft's ParamWrapper)
            module, _, parameter = module.rpartition(".")
            module += ".base_layer" * parameter.startswith("gate_up")
        for which, name in zip("AB", names, strict=True):
            index = piece.index if which == "B" else WHOLE
            stored = _STACKED[which] if is_routed else _copied
            shape = tuple(stored(torch.empty(shapes[name], device="meta")[index]).shape)
            make = functools.partial(_make, stored, read, name, index)
            yield TensorToWrite(f"base_model.model.{module}.lora_{which}.weight", shape, dtypes[name], make)


def _make(stored: Callable[[Tensor], Tensor], read: Read, name: str, index: Index) -> Tensor:
    return stored(read(name, index))


def _copied(adapter: Tensor) -> Tensor:
    return adapter.clone()  # gate and up share A, and safetensors rejects shared memory


# of all experts: A [E, rank, K] as rows of experts, B [E, N, rank] as columns, an expert's apart
_STACKED: dict[str, Callable[[Tensor], Tensor]] = {
    "A": lambda a: a.flatten(0, 1),
    "B": lambda b: b.permute(1, 2, 0).flatten(1),
}


def write_peft(
    folder: Path, config: ModelConfig, entries: Sequence[TensorToWrite], *, base: str | None, max_bytes: int,
    on_bytes: Callable[[int], None],
) -> list[Path]:  # fmt: skip
    """Write a folder for ``peft.PeftModel.from_pretrained``; return its files.

    Adapters of experts are of its ``target_parameters``. ``base``: folder of the frozen weights.
    """
    names = {entry.name.rpartition(".lora_")[0].split(".", 5)[-1] for entry in entries}
    modules = sorted(name for name in names if ".experts" not in name)
    routed = {name.removesuffix(".base_layer") for name in names} - {*modules}
    document = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": config.lora_rank,
        "lora_alpha": int(config.lora_alpha) if config.lora_alpha.is_integer() else config.lora_alpha,
        "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
        "target_modules": modules,
        "target_parameters": [f"{name}.{each}" for name in routed for each in ("down_proj", "gate_up_proj")],
        "base_model_name_or_path": base,
    }  # fmt: skip
    written = write_shards(folder, STEM, entries, max_bytes, on_bytes)
    path = folder / CONFIG
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return [path, *written]
