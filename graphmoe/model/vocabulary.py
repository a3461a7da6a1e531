"""Embedding and cross-entropy, whose vocabulary the ranks of tp share.

Rank i has the i-th part of the rows. No rank ever has all logits of a token. Suffixes: B batch, S sequence,
T = B * S tokens, V the rank's part of the vocabulary, D hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphmoe.model.linear import cut_along_tp
from graphmoe.ops.collectives import all_reduce, index_along, reduce_scatter

IGNORED = -100


class Embedding(nn.Embedding):
    """Token ids [B, S] -> hidden states of this rank's part of the sequence, [B, S / tp, D]."""

    def __init__(self, vocab_size: int, width: int, tp: int = 1) -> None:
        assert vocab_size % tp == 0, (vocab_size, tp)
        super().__init__(vocab_size // tp, width)
        self.tp = tp
        cut_along_tp(self.weight, tp, dim=0)

    def reset_parameters(self) -> None:
        """Leave the weight to ``init_weights``: on the meta device torch's own would import its compiler."""

    def forward(self, tokens_BS: Tensor) -> Tensor:
        if self.tp == 1:
            return super().forward(tokens_BS)
        own_BS, row_BS = _own_rows(tokens_BS, self.num_embeddings)
        x_BSD = F.embedding(row_BS, self.weight).masked_fill(~own_BS.unsqueeze(-1), 0.0)
        return reduce_scatter(x_BSD, "tp", self.tp, dim=1)


def cross_entropy_sum(logits_TV: Tensor, labels_T: Tensor, tp: int = 1) -> Tensor:
    """Sum of the cross-entropies of the labels that are not ignored, from fp32 logits -> fp32 scalar.

    The same on all ranks of tp: they share each token's largest logit, then the sum of exponentials and the
    label's logit, which one of them has.
    """
    if tp == 1:
        return F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORED, reduction="sum")
    own_T, row_T = _own_rows(labels_T, logits_TV.shape[1])
    highest_T = all_reduce(logits_TV.detach().amax(dim=-1), "tp", tp, "max")
    shifted_TV = logits_TV - highest_T.unsqueeze(1)
    label_T = shifted_TV.gather(1, row_T.unsqueeze(1)).squeeze(1).masked_fill(~own_T, 0.0)
    sums_2T = all_reduce(torch.stack([shifted_TV.exp().sum(dim=-1), label_T]), "tp", tp)
    loss_T = sums_2T[0].log() - sums_2T[1]
    return loss_T.masked_fill(labels_T == IGNORED, 0.0).sum()


def _own_rows(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Whether this rank has each id, and its row there; of other ids some row, not always the same.

    Where all of them took one row, its gradient would be a sum of most tokens, one after the other.
    """
    own = ids.div(num_rows, rounding_mode="floor") == index_along("tp", ids)
    return own, ids.remainder(num_rows)
