"""Code of a user's own, outside the package, is named by ``package.module:NAME`` and trains."""

from __future__ import annotations

import pytest

from graphmoe.config.schema import ConfigError
from graphmoe.plan.rules.check import check
from tests.runs import config, metrics, train_in

QUIET = ("train.val_batches=0", "checkpoint.enabled=false", "train.log_interval=1")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Write a module of the user's into a folder on the path."""
    monkeypatch.syspath_prepend(tmp_path)
    return lambda name, text: (tmp_path / f"{name}.py").write_text(text)


def test_a_learning_rate_schedule(own, tmp_path):
    own("own_schedules", "def linear(progress):\n    return 1 - progress\n")
    train_in(tmp_path / "run", *QUIET, "optim.schedule=own_schedules:linear", "optim.min_lr_ratio=0")
    rates = [row["lr"] for row in metrics(tmp_path / "run") if "lr" in row]
    assert rates == pytest.approx([1e-2 * (1 - step / 6) for step in range(1, 7)], abs=1e-8)


@pytest.mark.parametrize("key", ["optim.schedule"])
def test_a_name_that_no_table_has_is_refused_with_those_it_has(key):
    with pytest.raises(ConfigError, match=rf"{key}=nothing: there is no such choice; .*module:NAME"):
        check(config(f"{key}=nothing"))


@pytest.mark.parametrize("key", ["optim.schedule"])
def test_code_that_cannot_be_imported_is_named(key, tmp_path):
    with pytest.raises(ConfigError, match=rf"{key}=no_such_module:this cannot be imported"):
        train_in(tmp_path, *QUIET, f"{key}=no_such_module:this")
