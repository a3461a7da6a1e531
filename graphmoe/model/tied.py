"""A head whose weight is the embedding's: one parameter, which the model's state has once."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from graphmoe.plan.layout import layout_of

EMBEDDING, HEAD = "embed.weight", "loss_head.head.weight"
"""The two names of the parameter. The state of the model has the first, as ``named_parameters`` does."""


def tie_head(model: nn.Module) -> None:
    """Make the head's weight the embedding's, and keep it so when the model loads a state."""
    of_embedding, of_head = (layout_of(model.get_parameter(name)) for name in (EMBEDDING, HEAD))
    assert of_embedding == of_head, "ranks of tp hold other rows of the head than of the embedding"
    _share(model)
    model.register_state_dict_post_hook(_leave_head_out)
    model.register_load_state_dict_pre_hook(_load_head_with_embedding)
    model.register_load_state_dict_post_hook(_share)


def _share(model: nn.Module, incompatible_keys: Any = None) -> None:
    """The two are one parameter; ``load_state_dict(assign=True)`` makes one for each."""
    holder, _, key = HEAD.rpartition(".")
    model.get_submodule(holder).register_parameter(key, model.get_parameter(EMBEDDING))


def _leave_head_out(model: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
    del state[prefix + HEAD]


def _load_head_with_embedding(
    model: nn.Module,
    state: dict[str, Tensor],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """A state of the model has no weight of the head; one that has it is of a head that is not tied."""
    if prefix + HEAD in state:
        unexpected.append(prefix + HEAD)
    if prefix + EMBEDDING in state:
        state[prefix + HEAD] = state[prefix + EMBEDDING]
