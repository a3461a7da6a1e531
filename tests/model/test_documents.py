"""Documents of a packed sequence: attention, positions, losses and gradients stay within each."""

import dataclasses

import pytest
import torch

from graphmoe.config.schema import AuxLoss
from graphmoe.model.attention import in_documents
from graphmoe.model.blocks import IGNORED, attended_pairs, document_starts
from graphmoe.model.build import build_model
from graphmoe.model.transformer import shift_left
from graphmoe.plan.pipeline.layouts import pieces_of
from tests.model.models import CONFIGS, S, V, both
from tests.tolerances import assert_forward_close, assert_gradient_close, relative_error

END = 0
LENGTHS = (3, 1, 5, 3), (S,), (4, S - 4)
"""Tokens of the documents of each sequence, with their end tokens."""
ENDED = True, False, False
"""Whether the last document of a sequence ends with it."""


def documents(seed=0):
    """Documents of tokens by sequence, and the token after each sequence."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for lengths, ended in zip(LENGTHS, ENDED, strict=True):
        row = [torch.randint(1, V, (length,), generator=generator) for length in lengths]
        for document in row if ended else row[:-1]:
            document[-1] = END
        found.append((row, torch.randint(1, V, (1,), generator=generator)))
    return found


def packed(found):
    rows = torch.stack([torch.cat([*row, after]) for row, after in found])
    return rows[:, :-1], rows[:, 1:]


def alone(found):
    """Tokens and labels of each document as a sequence of its own."""
    for row, after in found:
        for document in row:
            last = document.new_tensor([IGNORED]) if document[-1] == END else after
            yield document[None], torch.cat([document[1:], last])[None]


NOPE = dataclasses.replace(CONFIGS["gqa"], nope_every=2, attention_temperature_floor=2, qk_norm_weight=False)
kinds = pytest.mark.parametrize("name", [*CONFIGS, "nope"])


def model_of(name, mtp_depth=1, *, masked=True):
    changes = {"aux_loss": AuxLoss.none, "mtp_depth": mtp_depth, "mtp_loss_weight": 0.4}
    model = build_model(dataclasses.replace((CONFIGS | {"nope": NOPE})[name], **changes))
    if masked:
        model.mask_documents(END)
    return model


@kinds
def test_a_packed_sequence_is_its_documents_one_by_one(name):
    """Losses, counts of experts and every gradient: each document weighs as its share of the labels."""
    found, one, many = documents(), model_of(name), model_of(name, masked=False)
    output = one.loss(*packed(found))
    output.total.backward()
    main, mtp, counts_LE = 0.0, 0.0, 0
    # the prediction of a later token has a label less
    of_main = [(labels != IGNORED).sum().item() for _, labels in alone(found)]
    of_mtp = [(labels[:, 1:] != IGNORED).sum().item() for _, labels in alone(found)]
    for (tokens, labels), n, m in zip(alone(found), of_main, of_mtp, strict=True):
        share, of_later = n / sum(of_main), m / sum(of_mtp)
        many.config = dataclasses.replace(many.config, mtp_loss_weight=0.4 * of_later / max(share, 1e-9))
        part = many.loss(tokens, labels)
        (share * part.total).backward()
        main, mtp = main + share * part.cross_entropy, mtp + of_later * part.mtp
        counts_LE = counts_LE + part.counts_LE
    assert_forward_close(output.cross_entropy, main)
    assert_forward_close(output.mtp, mtp)
    assert output.counts_LE.equal(counts_LE)
    for parameter, other in zip(one.parameters(), many.parameters(), strict=True):
        assert_gradient_close(parameter.grad, other.grad)


@kinds
def test_logits_are_those_of_each_document(name):
    found = documents(1)
    tokens, _ = packed(found)
    whole, many = model_of(name)(tokens), model_of(name, masked=False)
    for logits, (row, _) in zip(whole, found, strict=True):
        for part, document in zip(logits.split([*map(len, row)]), row, strict=True):
            assert_forward_close(part, many(document[None])[0])
    unmasked = many(tokens)
    assert_forward_close(unmasked[1], whole[1])
    assert relative_error(unmasked[0, 3:], whole[0, 3:]) > 0.1


@both
@pytest.mark.parametrize("own", range(4))
def test_losses_of_a_document_reach_no_other_one(name, own):
    """Each document has an id of its own: only that of one has a gradient in the embedding."""
    model, lengths = model_of(name, mtp_depth=2), LENGTHS[0]
    row = torch.cat([torch.tensor([own_id(i)] * (n - 1) + [END]) for i, n in enumerate(lengths)])
    labels, start = torch.full((S,), IGNORED), sum(lengths[:own])
    labels[start : start + lengths[own]] = 7
    model.loss(row[None], labels[None]).total.backward()
    reached = {*model.embed.weight.grad.any(dim=1).nonzero().flatten().tolist()}
    assert reached - {END} == ({own_id(own)} if lengths[own] > 1 else set())


def own_id(number):
    return 10 * number + 5


def test_documents_start_after_end_tokens_and_at_the_start():
    tokens = torch.tensor([[5, 0, 0, 3, 4, 0], [1, 2, 3, 4, 5, 6], [0, 1, 0, 0, 0, 2]])
    first = document_starts(tokens, END)
    assert first.dtype == torch.int32
    assert first.tolist() == [[0, 0, 2, 3, 3, 3], [0] * 6, [0, 1, 1, 3, 4, 5]]
    table = torch.rand(6, 4)
    assert (
        in_documents(table, first)[0].equal(table[[0, 1, 0, 0, 1, 2]]) and in_documents(table, None) is table
    )
    assert attended_pairs(first).item() == (1 + 2 + 1 + 1 + 2 + 3) + 21 + (1 + 1 + 2 + 1 + 1 + 1)
    assert attended_pairs(first, 2).item() == (1 + 2 + 1 + 1 + 2 + 2) + 11 + (1 + 1 + 2 + 1 + 1 + 1)


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        (1, [[11, -1, -1, 14, 15, -1], [21, 22, 23, 24, 25, -1]]),
        (2, [[-1, -1, -1, 15, -1, -1], [22, 23, 24, 25, -1, -1]]),
    ],
)
def test_values_of_other_documents_are_not_shifted_in(by, expected):
    first = document_starts(torch.tensor([[5, 0, 0, 3, 4, 0], [1, 2, 3, 4, 5, 6]]), END)
    values = torch.stack([torch.arange(10, 16), torch.arange(20, 26)])
    assert shift_left(values, by, -1, first).tolist() == expected


def test_a_stage_without_the_loss_counts_no_pairs():
    model, (tokens, labels) = model_of("mla", 0), packed(documents())
    first, last = pieces_of("Ettt|L", num_layers=3, mtp_depth=0, num_stages=2)
    before = model.stage(first, (), tokens, labels)
    after = model.stage(last, before.carried, tokens, labels)
    whole = model.loss(tokens, labels)
    assert (before.attended.item(), after.attended.item()) == (0, whole.attended.item())
    assert whole.attended.item() == sum(n * (n + 1) // 2 for row in LENGTHS for n in row)
    assert_forward_close(after.cross_entropy, whole.cross_entropy)
