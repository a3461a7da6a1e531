"""A source of samples in which all, few or no labels train, and the loss of a global batch of them."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from graphmoe.config.schema import RunConfig
from graphmoe.data.corpus import Corpus
from graphmoe.data.samples import Samples
from graphmoe.model.build import build_model
from graphmoe.model.transformer import Transformer
from graphmoe.segments import run_segments

END = 0
ENDS = {  # end tokens of a sample; the rest are others
    "none": slice(None),  # trains nothing
    "few": slice(2, None),  # two labels, and one of the second depth
    "pairs": slice(1, None, 2),  # half of the labels, and none of the second depth
    "full": slice(0),
}
ORDER = (
    "none", "none", "full", "few", "none", "pairs", "few", "few", "full", "none", "few", "full", "none",
    "none", "full", "pairs", "few", "none",
)  # fmt: skip
WORDS = (
    "data.source=tests.distributed.unequal:unequal", "data.document_mask=true", "model.mtp_depth=1",
    "model.mtp_loss_weight=0.5", "model.aux_loss=none", "model.aux_loss_coef=0", "model.z_loss_coef=0",
    "model.selection_bias=false", "train.clip_grad_norm=0", "optim.lr=1e-30", "optim.weight_decay=0",
)  # fmt: skip
"""Weights stay as they are, so that the last step has gradients of the first weights."""
NOTHING = (*WORDS, "data.source=tests.distributed.unequal:untrained")


class Unequal(Samples):
    def __init__(self, seq_len: int, vocab_size: int, first: int, order: tuple[str, ...]) -> None:
        self.seq_len, self.vocab_size, self.first, self.order = seq_len, vocab_size, first, order
        self.num_samples, self.fingerprint = None, f"unequal:{first}:{order}"

    def sample(self, position):
        number = self.first + position
        tokens = np.random.default_rng(number).integers(1, self.vocab_size, self.seq_len + 1)
        tokens[ENDS[self.order[number % len(self.order)]]] = END
        return tokens


def unequal(config, seq_len, vocab_size, order=ORDER):
    train, val = (Unequal(seq_len, vocab_size, first, order) for first in (0, 1000))
    return Corpus(train, val, end_token=END)


def untrained(config, seq_len, vocab_size):
    return unequal(config, seq_len, vocab_size, ("none",))


class Wanted(NamedTuple):
    loss: float
    mtp: float
    trained: int
    gradients: dict[str, Tensor]


def last_batch(config: RunConfig, samples: Samples) -> Tensor:
    size, step = config.train.global_batch_size, config.train.steps
    return torch.from_numpy(samples.reader().read(size * (step - 1), size))


def model_of(config: RunConfig) -> Transformer:
    model = build_model(config.model, seed=config.train.seed, execution=config.moe)
    model.mask_documents(END)
    return model


def trained_of(batch: Tensor) -> int:
    """Labels that train, counted one by one: all but those of end tokens."""
    return sum(token != END for row in batch[:, :-1].tolist() for token in row)


def wanted(config: RunConfig) -> Wanted:
    """The last step as one micro-batch, whose sums of cross-entropies are divided by its own labels.

    Losses of the router are the mean of those of each micro-batch.
    """
    model, size = model_of(config), config.train.micro_batch_size
    train = unequal(None, config.data.seq_len, config.model.vocab_size).train
    batch = last_batch(config, train)
    tokens, labels = batch[:, :-1], batch[:, 1:]
    whole, none = model.loss(tokens, labels), torch.zeros(1 + config.model.mtp_depth)
    only_router = model.loss(tokens, labels, run_segments, none).total
    parts = [(t[:, :-1], t[:, 1:]) for t in batch.split(size)]
    of_parts = [model.loss(*part, run_segments, none).total for part in parts]
    (whole.total - only_router + sum(of_parts) / len(of_parts)).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return Wanted(whole.cross_entropy.item(), whole.mtp.item(), trained_of(batch), gradients)
