"""Ranks along the parallel dimensions: two foldings of the same ranks, and errors with the arithmetic."""

import itertools
import math

import pytest
import torch

from graphmoe.config.schema import ParallelConfig
from graphmoe.plan.layout import ALONE, AXES, DENSE, EXPERT, Cut, Layout, ParameterLayout, own_part

LAYOUTS = [
    Layout(),
    Layout(dp=8),
    Layout(dp=2, tp=2, cp=2),
    Layout(dp=2, tp=4, ep=8),
    Layout(dp=2, tp=2, cp=2, ep=2, etp=2),
    Layout(dp=2, tp=2, pp=2, ep=4),
    Layout(dp=96, tp=4, cp=2, ep=8),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_rank_is_in_one_group_of_each_axis(layout):
    ranks = layout.size("world")
    for axis in AXES:
        groups = layout.groups(axis)
        assert sorted(itertools.chain(*groups)) == list(range(ranks))
        assert {len(group) for group in groups} == {layout.size(axis)}
        for rank in {0, ranks // 2, ranks - 1}:
            assert layout.group(axis, rank)[layout.index(axis, rank)] == rank
    assert layout.edp * layout.ep * layout.etp == layout.dp * layout.cp * layout.tp


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_ranks_of_a_folding_meet_in_no_two_of_its_axes(layout):
    for folding in (DENSE, EXPERT):
        for rank in range(min(layout.size("world"), 16)):
            others = [set(layout.group(axis, rank)) - {rank} for axis in folding]
            assert all(not one & other for one, other in itertools.combinations(others, 2))
        assert math.prod(layout.size(axis) for axis in folding) == layout.size("world")


def test_each_axis_has_its_groups_of_ranks():
    layout = Layout(dp=2, cp=1, tp=2, pp=2, ep=4)
    assert layout.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert layout.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert layout.groups("ep") == layout.groups("stage") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert layout.groups("edp") == [(rank,) for rank in range(8)]
    folded = Layout(dp=4, tp=2, ep=2, etp=2)
    assert folded.groups("etp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert folded.groups("ep") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert folded.groups("edp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert folded.groups("ep_etp") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert Layout(dp=2, cp=2, tp=2).groups("dp_cp") == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_own_parts_are_cut_piece_by_piece():
    layout = Layout(dp=2, tp=2, ep=2, etp=2)
    rows = torch.arange(8)[:, None].expand(8, 3)
    gate_and_up = ParameterLayout((Cut(0, "tp", pieces=2),), "dp_cp")
    assert own_part(rows, gate_and_up, layout, 1)[:, 0].tolist() == [2, 3, 6, 7]
    experts = torch.arange(4 * 4 * 3).view(4, 4, 3)
    parallel = ParameterLayout((Cut(0, "ep"), Cut(1, "etp", pieces=2)), "edp")
    parts = [own_part(experts, parallel, layout, rank) for rank in range(4)]
    assert torch.equal(parts[2], experts[2:, [0, 2]])  # rank 2: second of ep, first of etp
    assert torch.equal(parts[1], experts[:2, [1, 3]])
    assert own_part(rows, ParameterLayout(), layout, 3) is rows


def test_ranks_that_no_other_axis_takes_are_data_parallel():
    assert Layout.of(ParallelConfig(), 1) == ALONE
    assert Layout.of(ParallelConfig(tp=2, cp=2), 8) == Layout(dp=2, tp=2, cp=2)
    assert Layout.of(ParallelConfig(ep=8, tp=4, cp=2), 768) == Layout(dp=96, tp=4, cp=2, ep=8)
