"""Collection: slow tests, and very many alike, run only if they are asked for by name; the fork server."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.forked import FORKS


def collected(expression, *marked):
    left_out = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    config = SimpleNamespace(getoption={"markexpr": expression}.get, hook=hook)
    items = [
        SimpleNamespace(number=number, path=Path("tests/test_x.py"), get_closest_marker=marks.__contains__)
        for number, marks in enumerate(marked)
    ]
    pytest_collection_modifyitems(config, items)
    return [item.number for item in items], [item.number for item in left_out]


@pytest.mark.parametrize(
    ("expression", "left"),
    [("", [0]), ("gpu", [0, 1]), ("not gpu", [0, 1]), ("slow", [0, 1]), ("not slow", [0, 1]),
     ("exhaustive", [0, 2]), ("slow or exhaustive or not slow", [0, 1, 2, 3])],
)  # fmt: skip
def test_slow_and_exhaustive_tests_run_only_where_an_expression_names_them(expression, left):
    """Count the tests that are left for the expression itself to choose from; on a GPU slow tests run too."""
    kept, left_out = collected(expression, set(), {"slow"}, {"exhaustive"}, {"slow", "exhaustive"})
    assert kept == left and sorted(kept + left_out) == [0, 1, 2, 3]


def test_children_of_the_fork_server_import_nothing_large():
    """Each process of a test would pay five seconds of a core for torch and its compiler."""
    child = FORKS.Process(target=_require_imported, daemon=True)
    child.start()
    child.join()
    assert child.exitcode == 0


def _require_imported():
    assert {"torch._inductor.compile_fx", "tests.runs"} <= sys.modules.keys()
