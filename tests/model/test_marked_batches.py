"""Batches whose ids have flags: labels without a loss, and documents that start at a token."""

import dataclasses

import pytest
import torch

from graphmoe.config.schema import AuxLoss
from graphmoe.config.token_flags import NO_LABEL, START
from graphmoe.model.blocks import IGNORED, MARKED, decoded
from graphmoe.model.build import build_model
from tests.model.models import CONFIGS, V, both
from tests.tolerances import assert_forward_close, assert_gradient_close

LENGTHS = (5, 4, 2, 2), (9, 4), (13,)
"""Tokens of the conversations of each sequence of 13, one more than the model's."""


def test_a_batch_is_decoded_to_ids_labels_and_starts():
    batch = torch.tensor([[5 | START | NO_LABEL, 6 | NO_LABEL, 7, 7 | START | NO_LABEL, 9, 7]])
    tokens, labels, first = decoded(batch[:, :-1], batch[:, 1:], MARKED)
    assert tokens.tolist() == [[5, 6, 7, 7, 9]] and labels.tolist() == [[IGNORED, 7, IGNORED, 9, 7]]
    assert first.tolist() == [[0, 0, 0, 3, 3]] and first.dtype == torch.int32
    assert decoded(tokens, labels, None) == (tokens, labels, None)
    ended = decoded(tokens, labels, 7)
    assert ended[0] is tokens and ended[1].tolist() == [[IGNORED, 7, IGNORED, IGNORED, 7]]
    assert ended[2].tolist() == [[0, 0, 0, 3, 4]]


def conversations(seed=0):
    """Conversations of each sequence; of each the last tokens have a loss."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for lengths in LENGTHS:
        row = [torch.randint(0, V, (length,), generator=generator) for length in lengths]
        for each in row:
            each[: (len(each) + 1) // 2] |= NO_LABEL
            each[0] |= START
        rows.append(row)
    return rows


def model_of(name, mtp_depth=0, *, marked=True):
    changes = {"aux_loss": AuxLoss.none, "mtp_depth": mtp_depth, "mtp_loss_weight": 0.4}
    model = build_model(dataclasses.replace(CONFIGS[name], **changes))
    if marked:
        model.mask_documents(MARKED)
    return model


def padded(row, length=13):
    """A conversation as a sequence of its own, padded by id 1 without a loss."""
    pad = torch.full((length - len(row),), 1 | NO_LABEL)
    return torch.cat([row, pad])[None]


@both
def test_packed_conversations_are_those_of_padded_sequences(name):
    """Loss and gradients; the model of the padded ones knows no documents, and ignores labels by -100."""
    rows, packed, alone = conversations(), model_of(name), model_of(name, marked=False)
    batch = torch.stack([torch.cat(row) for row in rows])
    output = packed.loss(batch[:, :-1], batch[:, 1:])
    output.total.backward()
    singles = torch.cat([padded(each) for row in rows for each in row])
    tokens, labels, _ = decoded(singles[:, :-1], singles[:, 1:], MARKED)
    others = alone.loss(tokens, labels)
    others.total.backward()
    assert output.cross_entropy.item() == pytest.approx(others.cross_entropy.item(), rel=1e-6)
    for parameter, other in zip(packed.parameters(), alone.parameters(), strict=True):
        assert_gradient_close(parameter.grad, other.grad)


@both
def test_losses_of_a_conversation_reach_no_other_one(name):
    row = conversations()[0]
    for own, each in enumerate(row):
        model = model_of(name, mtp_depth=2)
        marked = [(10 * i + 5) | (part & (START | NO_LABEL)) for i, part in enumerate(row)]
        marked = [part if i == own else part | NO_LABEL for i, part in enumerate(marked)]
        batch = torch.cat(marked)[None]
        model.loss(batch[:, :-1], batch[:, 1:]).total.backward()
        reached = model.embed.weight.grad.any(dim=1).nonzero().flatten().tolist()
        # multi-token prediction embeds what is beyond a conversation as id 0
        assert {*reached} - {0} == {10 * own + 5} and len(each) > 1


def test_depths_of_prediction_count_labels_of_their_own_conversation():
    """By a batch of one conversation a sequence, padded: the mean over all depths' labels is the same."""
    row, model = conversations(1)[1], model_of("mla", mtp_depth=1)
    whole = torch.cat(row)[None]
    together = model.loss(whole[:, :-1], whole[:, 1:])
    batch = torch.cat([padded(each) for each in row])
    assert_forward_close(model.loss(batch[:, :-1], batch[:, 1:]).mtp, together.mtp)


def test_flags_do_not_matter_to_generated_text():
    model, plain = model_of("gqa"), model_of("gqa", marked=False)
    tokens = torch.randint(0, V, (1, 9), generator=torch.Generator().manual_seed(0))
    assert_forward_close(model(tokens), plain(tokens))


def test_a_marked_batch_traces_without_a_break():
    batch = torch.cat([torch.cat(row)[None] for row in conversations()])

    @torch.compile(backend="eager", fullgraph=True)
    def traced(batch):
        return decoded(batch[:, :-1], batch[:, 1:], MARKED)

    for found, expected in zip(traced(batch), decoded(batch[:, :-1], batch[:, 1:], MARKED), strict=True):
        assert found.equal(expected)
