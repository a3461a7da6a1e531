"""Seeded permutations and hashes of indices, computed without a table.

A Feistel network with cycle walking permutes ``0 .. size-1``: O(1) time and memory for any position. Integer
arithmetic only, so the order is the same on every machine and numpy version.
"""

import numpy as np
import numpy.typing as npt

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
ROUNDS = 8

Index_N = npt.NDArray[np.int64]


def permute(index_N: Index_N, size: int, key: int) -> Index_N:
    """Return the images [N] of indices under a permutation of ``0 .. size-1``, chosen by ``key``."""
    assert size > 0
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    place_N = np.asarray(index_N, dtype=np.uint64)
    place_N = _feistel(place_N, half_bits, key)
    outside_N = place_N >= size
    while outside_N.any():  # the network acts on up to 4 * size places; walk on until back inside
        place_N[outside_N] = _feistel(place_N[outside_N], half_bits, key)
        outside_N = place_N >= size
    return place_N.astype(np.int64)


def derive_key(*parts: int) -> int:
    """Return a 64-bit key, different for each tuple of integers (seed, epoch, purpose, ...)."""
    key = 0
    for part in parts:
        key = int(mix64(np.array([(key + GOLDEN + part) & MASK], dtype=np.uint64))[0])
    return key


def mix64(x_N: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash 64-bit integers bijectively (splitmix64's finaliser)."""
    x_N = (x_N ^ (x_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_N = (x_N ^ (x_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x_N ^ (x_N >> np.uint64(31))


def held_out(hash_N: npt.NDArray[np.uint64], fraction: float) -> npt.NDArray[np.bool_]:
    """Return a mask of the smallest hashes: at least one, never all."""
    size = len(hash_N)
    mask_N = np.zeros(size, dtype=np.bool_)
    if fraction > 0 and size > 1:
        count = min(max(1, round(fraction * size)), size - 1)
        mask_N[np.argpartition(hash_N, count - 1)[:count]] = True
    return mask_N


def _feistel(place_N: npt.NDArray[np.uint64], half_bits: int, key: int) -> npt.NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left_N, right_N = place_N >> shift, place_N & mask
    for round_number in range(ROUNDS):
        round_key = np.uint64((key + round_number * GOLDEN) & MASK)
        left_N, right_N = right_N, left_N ^ (mix64(right_N ^ round_key) & mask)
    return (left_N << shift) | right_N
