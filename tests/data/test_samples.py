"""Orders of samples, packing of documents, and random tokens."""

import itertools
import re

import numpy as np
import pytest

from graphmoe.data import samples as order
from graphmoe.data.errors import BadRecords, DataError
from graphmoe.data.indexed import read_token_file, write_token_file
from graphmoe.data.loader import first_batches
from graphmoe.data.samples import Documents, MixedSamples, PackedSamples, split_for_validation
from graphmoe.data.sources import SyntheticSamples


@pytest.fixture
def make(tmp_path):
    def make(lengths, **changes):
        edges = np.cumsum([0, *lengths])
        documents = [np.arange(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]
        for name, part in (("a", documents[::2]), ("b", documents[1::2])):
            write_token_file(tmp_path / name, part, np.int32)
        table = Documents.from_files([read_token_file(tmp_path / "a"), read_token_file(tmp_path / "b")])
        return PackedSamples(table, **{"seq_len": 8, **changes}) if changes.pop("pack", True) else table

    return make


LENGTHS = [5, 1, 30, 0, 7, 12, 3, 3, 19, 8, 2, 40, 1, 1, 6]


def test_an_epoch_uses_every_token_at_most_once_as_an_input(make):
    samples = make(LENGTHS)
    inputs = samples.reader().read(0, samples.num_samples)[:, :-1].ravel()
    assert samples.num_samples == (sum(LENGTHS) - 1) // 8
    assert len(set(inputs.tolist())) == len(inputs) == samples.num_samples * 8


def test_each_epoch_has_another_order_and_other_cuts(make):
    samples = make(LENGTHS)
    n = samples.num_samples
    epochs = [samples.reader().read(epoch * n, n) for epoch in range(4)]
    for a, b in itertools.combinations(epochs, 2):
        assert not np.array_equal(a, b) and {*map(tuple, a)} != {*map(tuple, b)}


def test_without_shuffle_documents_come_in_the_order_of_the_files(make):
    samples = make(LENGTHS, shuffle=False)
    stream = np.concatenate([f.tokens_T for f in samples.documents.files])
    for i, row in enumerate(samples.reader().read(0, samples.num_samples)):
        assert row.tolist() == stream[i * 8 : i * 8 + 9].tolist()


@pytest.mark.parametrize("limit", [50, 137])
def test_an_id_beyond_the_vocabulary_names_file_document_and_position(make, limit):
    samples = make(LENGTHS, vocab_size=limit, shuffle=False)
    with pytest.raises(DataError) as error:
        samples.reader().read(0, samples.num_samples)
    said = r"(.*[ab]\.bin), document (\d+), position (\d+): token id \d+ is not below"
    name, document, position = re.match(said, str(error.value)).groups()
    file = read_token_file(name)
    assert file.tokens_T[file.start_N[int(document)] + int(position)] >= limit


def test_a_sample_with_a_bad_id_gives_way_to_the_next_good_one(make):
    bad = BadRecords(skip=True)
    samples = make(LENGTHS, vocab_size=120, bad=bad)
    everything = make(LENGTHS).reader().read(0, samples.num_samples)
    rows = samples.reader().read(0, samples.num_samples)
    good = (everything < 120).all(axis=1)
    assert np.array_equal(rows[good], everything[good]) and (rows < 120).all()
    assert bad.counts["sample with a token id beyond the vocabulary"] >= (~good).sum() > 0


@pytest.mark.parametrize("lengths", [[3] * 100, [50, 70], [200], [1, 1, 1]])
def test_the_validation_split_shares_no_token_with_training(make, lengths):
    table = make(lengths, pack=False)
    train, val = split_for_validation(table, 0.1)

    def tokens(part):
        return {t for n in range(part.num_documents) for t in part.tokens(n, 0, 10**6).tolist()}

    assert not tokens(train) & tokens(val)
    assert tokens(train) | tokens(val) == tokens(table)
    assert len(tokens(val)) == pytest.approx(0.1 * sum(lengths), abs=2)


def test_synthetic_samples_depend_on_seed_position_and_purpose_only():
    samples = SyntheticSamples(seq_len=16, vocab_size=100, seed=3)
    rows = samples.reader().read(0, 50)
    assert np.array_equal(rows[7:9], SyntheticSamples(16, 100, 3).reader().read(7, 2))
    assert not np.array_equal(rows, SyntheticSamples(16, 100, 4).reader().read(0, 50))
    assert not np.array_equal(rows, SyntheticSamples(16, 100, 3, purpose=1).reader().read(0, 50))
    assert rows.min() == 0 and rows.max() == 99 and len({*map(tuple, rows)}) == 50


def test_synthetic_documents_have_a_mean_length_and_are_other_samples():
    plain, documents = (SyntheticSamples(1000, 50, 3, document_length=length) for length in (None, 20))
    rows, others = (samples.reader().read(0, 50) for samples in (documents, plain))
    assert rows.size / (rows == 0).sum() == pytest.approx(20, rel=0.05)
    assert np.array_equal(rows[rows != 0], np.maximum(others, 1)[rows != 0]) and rows.max() == 49
    assert documents.fingerprint != plain.fingerprint and plain.fingerprint.count(":") == 4


def test_first_batches_end_with_the_epoch_but_give_at_least_one(make):
    samples = make([30])
    assert samples.num_samples == 3
    assert len(list(first_batches(samples, 9, 2))) == 1
    assert [b.shape[0] for b in first_batches(samples, 9, 4)] == [4]
    assert list(first_batches(samples, 0, 4)) == []


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 65, 1000, 4097])
def test_permute_is_a_permutation_of_every_size(size):
    places = order.permute(np.arange(size), size, key=7)
    assert sorted(places.tolist()) == list(range(size))
    assert order.permute(np.array([size - 1]), size, key=7)[0] == places[-1]


def test_held_out_takes_the_fraction_but_never_nothing_or_all():
    for size, fraction, count in ((100, 0.05, 5), (3, 0.05, 1), (2, 0.9, 1), (1, 0.5, 0)):
        hashes = order.mix64(np.arange(1, size + 1, dtype=np.uint64))
        assert order.held_out(hashes, fraction).sum() == count


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, 1000), (3, 3, 1e-6)])
def test_each_corpus_of_a_mixture_has_its_share_of_every_long_part_and_loses_no_sample(make, weights):
    documents = make(LENGTHS * 3, pack=False)
    parts = [PackedSamples(documents, 8, seed) for seed in range(len(weights))]
    mixed = MixedSamples(documents, parts, weights, seed=5)
    asked = [[] for _ in parts]
    for part, got in zip(parts, asked, strict=True):
        part.sample = got.append
    length = 5 * 1024
    for position in range(length):
        mixed.sample(position)
        if position % 1024 == 1023:
            for got, weight in zip(asked, weights, strict=True):
                assert abs(len(got) - weight / sum(weights) * (position + 1)) < len(parts)
    assert all(sorted(got) == [*range(len(got))] for got in asked), "each of its samples once"
    first = max(asked, key=len)[:200]
    assert first != sorted(first), "places of a block are shuffled"


def test_a_mixture_is_another_one_with_other_weights_seed_or_parts(make):
    documents = make(LENGTHS, pack=False)
    parts = [PackedSamples(documents, 8, seed) for seed in range(3)]
    kinds = [(parts[:2], (1, 2), 0), (parts[:2], (2, 1), 0), (parts[:2], (1, 2), 1), (parts[1:], (1, 2), 0)]
    assert len({MixedSamples(documents, *kind).fingerprint for kind in kinds}) == len(kinds)
    assert MixedSamples(documents, *kinds[0]).num_samples == 2 * parts[0].num_samples
