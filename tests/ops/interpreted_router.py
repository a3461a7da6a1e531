"""The router's kernels, run by Triton's interpreter on CPU tensors.

Collected by tests/ops/test_router_op.py; see tests/ops/interpreted.py.
"""

from __future__ import annotations

import pytest
import torch

from graphmoe.ops import router_kernels
from tests.ops.router_cases import (
    CASES,
    Case,
    assert_bad_logits_give_ids_in_range,
    assert_matches_fp64,
    assert_ties_go_to_the_lower_id,
    by_autograd,
    by_kernels,
    differentiable,
    inputs_of,
)


@pytest.mark.parametrize("name", CASES)
def test_router_kernels_match_fp64(name):
    assert_matches_fp64(by_kernels, CASES[name])


@pytest.mark.parametrize("most_programs", [1, 7])
def test_a_router_program_takes_several_blocks(most_programs, monkeypatch):
    """Blocks of 4 tokens and few programs, so that the last round of each is cut or empty."""
    monkeypatch.setattr(router_kernels, "BLOCK", 64)
    monkeypatch.setattr(router_kernels, "MOST_PROGRAMS", most_programs)
    assert_matches_fp64(by_kernels, Case(2, 45, 16, 3, renormalise=True))
    assert_matches_fp64(by_kernels, Case(2, 45, 12, 3, groups=(3, 2, 1)))


def test_router_kernels_sum_more_partial_rows_and_columns_than_one_block(monkeypatch):
    monkeypatch.setattr(router_kernels, "BLOCK", 64)
    monkeypatch.setattr(router_kernels, "SUMMED_ROWS", 4)
    monkeypatch.setattr(router_kernels, "SUMMED_COLUMNS", 8)
    assert_matches_fp64(by_kernels, Case(2, 45, 15, 3))


def test_router_kernels_give_ties_to_the_lower_id():
    assert_ties_go_to_the_lower_id(by_kernels)


def test_router_kernels_keep_ids_in_range_whatever_the_logits():
    assert_bad_logits_give_ids_in_range(by_kernels)


def test_router_kernels_choose_what_the_plain_form_chooses():
    for case in CASES.values():
        for seed in range(1, 4):
            inputs = inputs_of(case, seed)
            kernels, plain = (run(*inputs, case, differentiable)[0] for run in (by_kernels, by_autograd))
            assert torch.equal(kernels[1], plain[1]) and torch.equal(kernels[2], plain[2])
