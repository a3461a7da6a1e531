"""Flat ranges of cut parameters as boxes of the whole, against the elements themselves."""

import math
import random

import numpy as np
import torch

from graphmoe.checkpoint.flat_shards import FlatShard, shards_of
from graphmoe.plan.layout import ALONE, Cut, Layout, ParameterLayout, own_part

LAYOUTS = [ALONE, Layout(dp=4), Layout(dp=2, tp=2), Layout(tp=4, ep=2, etp=2), Layout(dp=3, tp=2, ep=3)]


def random_shard(seed: int) -> tuple[FlatShard, np.ndarray]:
    """A range of an own part that holds each element's number, and the whole, in a random layout."""
    chosen = random.Random(seed)
    layout = chosen.choice(LAYOUTS)
    rank = chosen.randrange(layout.size("world"))
    sizes = [chosen.choice([1, 1, 2, 3, 4]) for _ in range(chosen.randrange(0, 5))]
    cuts = []
    for dim in range(len(sizes)):
        for _ in range(chosen.choice([0, 0, 1, 1, 2])):  # two cuts of one dimension, too
            cut = Cut(dim, chosen.choice(["dp", "tp", "ep", "etp", "edp", "dp_cp"]), chosen.choice([1, 2]))
            sizes[dim] *= cut.pieces * layout.size(cut.axis)
            cuts.append(cut)
    parallel = ParameterLayout(tuple(chosen.sample(cuts, len(cuts))))
    whole = torch.arange(math.prod(sizes)).reshape(sizes)
    part = own_part(whole, parallel, layout, rank)
    start, stop = sorted(chosen.randint(0, part.numel()) for _ in range(2))
    buffer = torch.cat([torch.full((3,), -1), part.reshape(-1)[start:stop], torch.full((2,), -1)])
    data = buffer[3 : 3 + stop - start]
    return FlatShard(data, start, part.shape, parallel, layout, rank), whole.numpy()


def test_boxes_cover_a_range_of_an_own_part_once_and_nothing_else():
    for seed in range(2000):
        shard, whole = random_shard(seed)
        assert tuple(shard.whole_shape) == whole.shape
        numbers = []
        for box in shard.boxes():
            place = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
            there = whole[place]
            assert there.size and there.shape == box.sizes
            assert np.array_equal(box.view(shard.data).numpy(), there), (seed, box)
            numbers.append(there.reshape(-1))
        covered = np.sort(np.concatenate(numbers)) if numbers else np.zeros(0)
        assert np.array_equal(covered, np.sort(shard.data.numpy())), seed


def test_an_empty_parameter_has_one_box():
    cut = ParameterLayout((Cut(1, "tp"),))
    nothing = FlatShard(torch.zeros(0), 0, torch.Size((0, 3)), cut, Layout(tp=2), 1)
    ((offsets, sizes, *_),) = nothing.boxes()
    assert (offsets, sizes) == ((0, 0), (0, 6))


def test_a_model_gives_shards_of_what_is_cut_and_tensors_of_the_rest():
    model = torch.nn.Linear(4, 2)
    model.register_buffer("count", torch.zeros(3))
    model.weight.parallel = ParameterLayout((Cut(0, "tp"),), "dp_cp")
    state = shards_of(model, Layout(tp=2), 1)
    weight = state["weight"]
    assert isinstance(weight, FlatShard) and weight.whole_shape == (4, 4)
    assert weight.data.data_ptr() == model.weight.data_ptr() and not weight.data.requires_grad
    assert {name for name, each in state.items() if isinstance(each, torch.Tensor)} == {"bias", "count"}
    assert state["bias"].data_ptr() == model.bias.data_ptr() and not state["bias"].requires_grad


def test_the_elements_that_a_shard_has_of_a_part_of_the_whole_are_found():
    for seed in range(1000):
        shard, whole = random_shard(seed)
        chosen = random.Random(seed)
        index = []
        for size in whole.shape[: chosen.randint(0, whole.ndim)]:
            start = chosen.randrange(size)
            index.append(chosen.choice([start, slice(None), slice(start, chosen.randint(start, size))]))
        region, numbers = whole[tuple(index)], []
        for view, there in shard.within(tuple(index)):
            assert np.array_equal(view.numpy(), region[there]), seed
            numbers.append(view.reshape(-1).numpy())
        covered = np.sort(np.concatenate(numbers)) if numbers else np.zeros(0)
        assert np.array_equal(covered, np.intersect1d(region, shard.data.numpy())), seed
