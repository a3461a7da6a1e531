"""Loading and saving of models in Hugging Face's folder format."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from graphmoe.checkpoint.hf.folder import hf_entries, open_hf, write_hf
from graphmoe.checkpoint.hf.tensor_files import DEFAULT_SHARD
from graphmoe.config.arguments import parse_size
from graphmoe.config.schema import ConfigError, ModelConfig
from graphmoe.model.build import Transformer, build_model


def load_hf(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> tuple[ModelConfig, Transformer]:
    """Read configuration and model from a Hugging Face folder, by default in the folder's dtype.

    docs/models.md lists the families.
    *Raises* ConfigError listing all keys with unsupported values, or all tensors that are missing, extra or
    of another shape.
    """
    source = open_hf(Path(folder))
    source.check()
    model = build_model(source.config, device=device, dtype=dtype or source.dtype(), seed=None)
    source.fill(model.state_dict())
    return source.config, model


def save_hf(
    model: Transformer,
    config: ModelConfig,
    folder: str | Path,
    *,
    max_shard_size: int | str = DEFAULT_SHARD,
    token_ids: Mapping[str, Any] | None = None,
) -> None:
    """Write a folder that ``transformers`` reads; ``config`` decides the family. Weights keep their dtype.

    ``token_ids``: bos_token_id, eos_token_id and pad_token_id for config.json. *Raises* ConfigError naming
    keys that no family can express, or tensors that do not fit the configuration.
    """
    state = model.state_dict()
    try:
        build_model(config, device="meta").load_state_dict(state, assign=True)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise ConfigError(f"the model does not fit the configuration: {error}") from error
    dtypes = {name: tensor.dtype for name, tensor in state.items()}
    if isinstance(max_shard_size, str):
        max_shard_size = parse_size("max_shard_size", max_shard_size, least=1)
    _, raw, entries = hf_entries(config, dtypes, lambda name, index: state[name][index])
    write_hf(Path(folder), raw, entries, max_bytes=max_shard_size, token_ids=token_ids)
