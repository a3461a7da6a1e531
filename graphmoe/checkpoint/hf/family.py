"""What one model family states: keys of its config.json, names of its tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from graphmoe.checkpoint.hf.keys import Keys
from graphmoe.config.schema import ModelConfig


@dataclass(frozen=True)
class Family:
    """Configuration format and tensor names of a model family."""

    # model_type in config.json
    name: str
    architecture: str
    attention: str
    # our name of each attention tensor, keyed by its published name; several names: their rows stacked
    attention_names: Callable[[ModelConfig], dict[str, str]]
    read: Callable[[Keys], dict[str, Any]]
    # the nearest config.json, which may not express all of the model
    write: Callable[[ModelConfig], dict[str, Any]]
    # a MoE block inside its layer
    moe: str = "mlp"
    # matrices of a routed expert; None if a layer's experts are one tensor
    gate_up_down: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")
    # other model_types with the same code
    aliases: tuple[str, ...] = ()
    # values of config.json's attention_bias that are supported
    attention_bias: tuple[bool, ...] = (False,)
    # parts of tensor names that differ from those of `pieces`, and what the family has instead
    renames: tuple[tuple[str, str], ...] = ()
    # a multi-token-prediction layer repeats embedding and head
    mtp_copies: bool = True
    # transformers requires hidden_size to be a multiple of num_attention_heads
    whole_heads: bool = False
