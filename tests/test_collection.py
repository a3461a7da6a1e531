"""Which tests are collected: those of very many alike only where they are asked for by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import BY_INDUCTOR, pytest_collection_modifyitems


def collected(expression: str, *marked: set[str]) -> tuple[list[int], list[int]]:
    """Numbers of the tests with these marks that are left and that are said to be left out."""
    left_out: list[SimpleNamespace] = []
    config = SimpleNamespace(
        getoption={"markexpr": expression}.get,
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)),
    )
    items = [
        SimpleNamespace(number=number, path=Path("tests/test_x.py"), get_closest_marker=marks.__contains__)
        for number, marks in enumerate(marked)
    ]
    pytest_collection_modifyitems(config, items)
    return [item.number for item in items], [item.number for item in left_out]


@pytest.mark.parametrize("expression", ["", "gpu", "not slow", "gpu and not slow"])
def test_exhaustive_tests_are_left_out_where_an_expression_does_not_name_them(expression):
    assert collected(expression, set(), {"exhaustive", "gpu"}, {"slow"}) == ([0, 2], [1])


@pytest.mark.parametrize("expression", ["exhaustive", "slow or exhaustive", "not exhaustive"])
def test_an_expression_that_names_them_decides_itself(expression):
    assert collected(expression, set(), {"exhaustive"}) == ([0, 1], [])


def test_what_inductor_compiles_of_very_many_alike_is_slow():
    assert {mark.name for mark in BY_INDUCTOR.marks} == {"exhaustive", "slow"}
