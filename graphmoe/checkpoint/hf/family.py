"""What one model family states: keys of its config.json, names and storage of its tensors."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from graphmoe.checkpoint.hf.keys import Keys
from graphmoe.checkpoint.hf.tensor_files import WHOLE, Index
from graphmoe.config.schema import ModelConfig


class Form(NamedTuple):
    """Storage that differs from ours: functions of tensors of any number of rows, or experts."""

    to_ours: Callable[[Tensor], Tensor]
    to_theirs: Callable[[Tensor], Tensor]
    # rows are experts, or of heads, read a block at a time, which bounds the memory
    of_experts: bool = True
    # rows that are converted together: those of a head
    block: int = 1


# matrices stored [in, out]
TRANSPOSED = Form(lambda w: w.mT, lambda w: w.mT)


class Multimodal(NamedTuple):
    """Folders that have a family's text model beside other models."""

    name: str
    """Their model_type; ``text_config`` in config.json is the text model's."""
    prefix: str
    """What the names of the text model's tensors begin with."""
    others: tuple[str, ...]
    """What the names of tensors begin with that are not read."""
    replaced: str = ""
    """What ``prefix`` replaces; a name that does not begin with it, such as the head's, is the same."""

    def renamed(self, name: str) -> str:
        """Return the name in such a folder of a tensor of the text model."""
        rest = name.removeprefix(self.replaced)
        return self.prefix + rest if name.startswith(self.replaced) else name


@dataclass(frozen=True)
class Piece:
    """A tensor of a published folder, by name: ``theirs`` equals ``ours[index]`` of our model bitwise.

    With ``rows``, only these of its rows, of ``num_rows``; the next pieces have the others.
    """

    theirs: str
    ours: str
    index: Index = WHOLE
    # another published tensor that this one must equal; folders may omit the copy
    repeats: str | None = None
    # False if our folders omit it
    written: bool = True
    # if set, ``form.to_ours(theirs)`` equals ``ours``
    form: Form | None = None
    rows: slice | None = None
    num_rows: int = 0

    def theirs_of(self, ours: Tensor) -> Tensor:
        """Return the published tensor, given ``ours[index]``."""
        return ours if self.form is None else self.form.to_theirs(ours)


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
    # the router inside a MoE block
    router: str = "gate"
    # matrices of a routed expert; None if a layer's experts are one tensor
    gate_up_down: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")
    # tensors of a layer's routed experts, given prefixes of their and our names; None: by ``gate_up_down``
    experts: Callable[[ModelConfig, str, str], Iterable[Piece]] | None = None
    # storage of attention's weights that differs from ours, by our names of them
    row_forms: Callable[[ModelConfig], dict[str, Form]] = lambda config: {}
    multimodal: Multimodal | None = None
    # other model_types with the same code
    aliases: tuple[str, ...] = ()
    # values of config.json's attention_bias that are supported
    attention_bias: tuple[bool, ...] = (False,)
    # parts of tensor names that differ from those of `pieces`, and what the family has instead
    renames: tuple[tuple[str, str], ...] = ()
    # tensors of the attention of a layer with a state, given prefixes of their and our names
    linear_attention: Callable[[ModelConfig, str, str], Iterable[Piece]] | None = None
    # norms are stored as their difference from 1, but those of `linear_attention`
    centred_norms: bool = False
    # a multi-token-prediction layer repeats embedding and head
    mtp_copies: bool = True
    # transformers requires hidden_size to be a multiple of num_attention_heads
    whole_heads: bool = False
    # supported quant_method of config.json's quantization_config
    quantization: str = "fp8"
