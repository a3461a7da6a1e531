"""Blocks of all models: norm, sharded matrices, embedding, cross-entropy, tied head, cp positions.

tp: Megatron-LM (arXiv 1909.08053, section 3), with sequences split outside matrices (arXiv 2205.05198,
section 4.2.2) and the vocabulary by rows. Suffixes: B batch, S sequence, T = B * S tokens, V this rank's part
of the vocabulary, D hidden.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphmoe.config.token_flags import ID_BITS, NO_LABEL, START
from graphmoe.ops.collectives import all_reduce, index_along, reduce_scatter
from graphmoe.plan.layout import Cut, Layout, ParameterLayout, layout_of
from graphmoe.segments import part

IGNORED = -100
MARKED = -1
"""In place of an end token: the flags of graphmoe.config.token_flags mark documents and labels."""
# both names of a tied weight; the state dict has the first
EMBEDDING, HEAD = "embed.weight", "loss_head.head.weight"


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` (arXiv 1910.07467), marked as the recomputable part ``layernorm``."""

    def forward(self, x: Tensor) -> Tensor:
        with part("layernorm"):
            return super().forward(x)


def column_parallel(width: int, outputs: int, tp: int, pieces: int = 1) -> nn.Linear:
    """Return a matrix sharded over tp by outputs, each of ``pieces`` equal row blocks separately."""
    assert outputs % (tp * pieces) == 0, (outputs, tp, pieces)
    linear = nn.Linear(width, outputs // tp, bias=False)
    cut_along_tp(linear.weight, tp, dim=0, pieces=pieces)
    return linear


def row_parallel(inputs: int, width: int, tp: int) -> nn.Linear:
    """Return a matrix sharded over tp by inputs; the caller sums GEMM outputs over tp."""
    assert inputs % tp == 0, (inputs, tp)
    linear = nn.Linear(inputs // tp, width, bias=False)
    cut_along_tp(linear.weight, tp, dim=1)
    return linear


def cut_along_tp(weight: Tensor, tp: int, dim: int, pieces: int = 1) -> None:
    if tp > 1:
        weight.parallel = ParameterLayout((Cut(dim, "tp", pieces),), "dp_cp")  # type: ignore[attr-defined]


def own_positions(whole: Tensor, layout: Layout, dim: int) -> Tensor:
    """Return this cp rank's positions along ``dim``. No device sync. *Raises* ValueError."""
    if layout.cp == 1:
        return whole
    place = index_along("cp", whole)
    chunks = 2 * layout.cp if layout.ring else layout.cp
    # a ring assigns chunks i and 2 * cp - 1 - i ("zigzag"), so causal attention is equal work on all
    # ranks
    if whole.shape[dim] % chunks:
        raise ValueError(f"{whole.shape[dim]} positions cannot be cut into {chunks} equal chunks")
    places = torch.stack([place, chunks - 1 - place]) if layout.ring else place.unsqueeze(0)
    return whole.unflatten(dim, (chunks, -1)).index_select(dim, places).flatten(dim, dim + 1)


def decoded(
    tokens_BS: Tensor, labels_BS: Tensor, end_token: int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return token ids, labels and the start of each position's document, [B, S] each. No device sync.

    ``tokens_BS`` and ``labels_BS`` are a batch [B, S + 1] without its last and its first token. ``end_token``
    ends a document, or is `MARKED`; None: a sequence is one document, and the starts are None. Labels that
    have no loss are `IGNORED`.
    """
    if end_token is None:
        return tokens_BS, labels_BS, None
    if end_token != MARKED:
        # the token after an end token begins another document
        labels_BS = labels_BS.masked_fill(tokens_BS == end_token, IGNORED)
        return tokens_BS, labels_BS, document_starts(tokens_BS, end_token)
    labels_BS = (labels_BS & ID_BITS).masked_fill((labels_BS & NO_LABEL) != 0, IGNORED)
    return tokens_BS & ID_BITS, labels_BS, _latest((tokens_BS & START) != 0)


def document_starts(tokens_BS: Tensor, end_token: int) -> Tensor:
    """Return where each position's document starts, int32 [B, S]; ``end_token`` ends one. No device sync."""
    # position 0 starts a document whatever wraps around to it
    return _latest((tokens_BS == end_token).roll(1, dims=1))


def _latest(starts_BS: Tensor) -> Tensor:
    position_S = torch.arange(starts_BS.shape[1], dtype=torch.int32, device=starts_BS.device)
    return (starts_BS * position_S).cummax(dim=1).values


def labels_at(labels_BS: Tensor, depth: int, first_BS: Tensor | None) -> Tensor:
    """Return the labels of a prediction depth: 0 is the next token, others are of MTP."""
    return shift_left(labels_BS, depth, IGNORED, first_BS) if depth else labels_BS


def shift_left(values_BS: Tensor, by: int, fill: int, first_BS: Tensor | None = None) -> Tensor:
    """Return values[:, i + by] at position i, ``fill`` past the end, or if another document has i + by."""
    # the wrapped-around values are masked below
    shifted_BS = values_BS.roll(-by, dims=1)
    position_S = torch.arange(values_BS.shape[1], device=values_BS.device)
    missing = position_S >= values_BS.shape[1] - by
    if first_BS is not None:
        missing = missing | (first_BS.roll(-by, dims=1) != first_BS)
    return shifted_BS.masked_fill(missing, fill)


def count_trained(batches: Sequence[Tensor], end_token: int | None, mtp_depth: int) -> Tensor:
    """Return how many labels are not ignored, int64 [micro-batches, 1 + mtp_depth]. No device sync.

    ``batches`` are token ids [B, S + 1] each, of equal shapes.
    """
    tokens_RT, depths = torch.cat([*batches]), range(1 + mtp_depth)
    _, labels_RS, first_RS = decoded(tokens_RT[:, :-1], tokens_RT[:, 1:], end_token)
    trained_DRS = torch.stack([labels_at(labels_RS, depth, first_RS) != IGNORED for depth in depths])
    return trained_DRS.view(len(depths), len(batches), -1).sum(dim=-1).T


def within_chunks(first_BS: Tensor, chunk: int) -> Tensor:
    """Return the start of each position's chunk, int32 [B, S]; ``first_BS``: that of its document."""
    # chunks count from the start of the document, or a packed one would not be what it is alone
    position_S = torch.arange(first_BS.shape[1], dtype=torch.int32, device=first_BS.device)
    return position_S - (position_S - first_BS) % chunk


def attended_pairs(first_BS: Tensor, window: int = 0, chunk: int = 0) -> Tensor:
    """Return the number of unmasked (query, key) pairs, int64 scalar. No device sync."""
    if chunk:
        first_BS = within_chunks(first_BS, chunk)
    keys_BS = torch.arange(1, first_BS.shape[1] + 1, device=first_BS.device) - first_BS
    return (keys_BS.clamp_max(window) if window else keys_BS).sum()


class Embedding(nn.Embedding):
    """Maps token ids [B, S] to this rank's part of the sequence, [B, S / tp, D]."""

    def __init__(self, vocab_size: int, width: int, tp: int = 1) -> None:
        assert vocab_size % tp == 0, (vocab_size, tp)
        super().__init__(vocab_size // tp, width)
        self.tp = tp
        cut_along_tp(self.weight, tp, dim=0)

    def reset_parameters(self) -> None:
        """Do nothing; weights are set later."""
        # ``init_weights`` fills the weight; torch's own on the meta device imports its compiler

    def forward(self, tokens_BS: Tensor) -> Tensor:
        if self.tp == 1:
            return super().forward(tokens_BS)
        own_BS, row_BS = _own_rows(tokens_BS, self.num_embeddings)
        x_BSD = F.embedding(row_BS, self.weight).masked_fill(~own_BS.unsqueeze(-1), 0.0)
        return reduce_scatter(x_BSD, "tp", self.tp, dim=1)


def cross_entropy_sum(logits_TV: Tensor, labels_T: Tensor, tp: int = 1) -> Tensor:
    """Sum cross-entropies of labels not ignored; fp32 logits -> fp32 scalar, equal on all tp ranks."""
    if tp == 1:
        return F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORED, reduction="sum")
    own_T, row_T = _own_rows(labels_T, logits_TV.shape[1])
    # tp ranks reduce each token's largest logit, then the sum of exponentials and (from one rank) the label's
    highest_T = all_reduce(logits_TV.detach().amax(dim=-1), "tp", tp, "max")
    shifted_TV = logits_TV - highest_T.unsqueeze(1)
    label_T = shifted_TV.gather(1, row_T.unsqueeze(1)).squeeze(1).masked_fill(~own_T, 0.0)
    sums_2T = all_reduce(torch.stack([shifted_TV.exp().sum(dim=-1), label_T]), "tp", tp)
    loss_T = sums_2T[0].log() - sums_2T[1]
    return loss_T.masked_fill(labels_T == IGNORED, 0.0).sum()


def _own_rows(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    own = ids.div(num_rows, rounding_mode="floor") == index_along("tp", ids)
    # ids of other ranks keep distinct rows: the gradient of one row for all would be a serial sum over most
    # tokens
    return own, ids.remainder(num_rows)


def tie_head(model: nn.Module) -> None:
    """Share the embedding's weight with the head, also after loading a state."""
    layouts = [layout_of(model.get_parameter(name)) for name in (EMBEDDING, HEAD)]
    assert layouts[0] == layouts[1], "ranks of tp hold other rows of the head than of the embedding"
    _share_weight(model)
    model.register_state_dict_post_hook(_leave_head_out)
    model.register_load_state_dict_pre_hook(_load_head_with_embedding)
    model.register_load_state_dict_post_hook(_share_weight)


def mark_shared(model: nn.Module, layout: Layout) -> None:
    """Mark embedding and head, which several segments read; stages sum the embedding's gradients."""
    for name, weight in model.named_parameters():
        if name in (EMBEDDING, HEAD):
            parallel = replace(layout_of(weight), is_shared=True)
            over_stages = name == EMBEDDING and len(layout.embed_on) > 1
            weight.parallel = replace(parallel, summed_over="embed") if over_stages else parallel  # type: ignore[attr-defined]


def _share_weight(model: nn.Module, incompatible_keys: Any = None) -> None:
    holder, _, key = HEAD.rpartition(".")
    # load_state_dict(assign=True) unties the weight
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
    # the model that wrote a head weight has no tied head
    if prefix + HEAD in state:
        unexpected.append(prefix + HEAD)
    if prefix + EMBEDDING in state:
        state[prefix + HEAD] = state[prefix + EMBEDDING]
