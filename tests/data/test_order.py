import numpy as np
import pytest

from graphmoe.data.order import derive_key, held_out, mix64, permute


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 65, 1000, 4097])
def test_permute_is_a_permutation_of_every_size(size):
    places = permute(np.arange(size), size, key=7)
    assert sorted(places.tolist()) == list(range(size))


def test_one_index_is_sent_to_the_same_place_alone_and_among_all():
    size = 12345
    places = permute(np.arange(size), size, key=3)
    for index in (0, 1, 777, size - 1):
        assert permute(np.array([index]), size, key=3)[0] == places[index]


def test_every_place_is_about_equally_likely_over_the_keys():
    size, trials = 7, 2000
    places = np.array([permute(np.arange(size), size, derive_key(5, epoch)) for epoch in range(trials)])
    for index in range(size):
        counts = np.bincount(places[:, index], minlength=size)
        assert abs(counts - trials / size).max() < 5 * np.sqrt(trials / size)


def test_keys_of_different_epochs_and_purposes_differ():
    keys = {
        derive_key(seed, epoch, purpose) for seed in range(10) for epoch in range(10) for purpose in range(4)
    }
    assert len(keys) == 400


@pytest.mark.parametrize(
    ("size", "fraction", "count"), [(100, 0.05, 5), (3, 0.05, 1), (2, 0.9, 1), (1, 0.5, 0)]
)
def test_held_out_takes_the_fraction_but_never_nothing_or_all(size, fraction, count):
    hashes = mix64(np.arange(1, size + 1, dtype=np.uint64))
    assert held_out(hashes, fraction).sum() == count
