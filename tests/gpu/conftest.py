"""Tests of this folder carry the marker ``gpu`` and are skipped where there is no GPU; trainers for them."""

from pathlib import Path

import pytest
import torch

from tests.gpu.tiny import GPU, UNREAD
from tests.runs import trainer_in


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; the hook sees those of the whole session.

    One worker runs all tests of a file, which share its fixtures. ``WORKERS`` is the number of workers if
    they share none; ``SHARED`` names fixtures, and the tests of each run on one worker.
    """
    folder = Path(__file__).parent
    for number, item in enumerate(items):
        module = getattr(item, "module", None)
        dealt = number % getattr(module, "WORKERS", 1)
        part = next((name for name in getattr(module, "SHARED", ()) if name in item.fixturenames), dealt)
        item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}_{part}"))
        if folder in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


@pytest.fixture
def deterministic_words(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return ("precision.deterministic=true",)


@pytest.fixture
def warm(tmp_path):
    """Make trainers that have done a few steps, the first of which waits for the device."""
    trainers = []

    def make(*overrides: str, steps: int = 3):
        trainer = trainer_in(tmp_path, *GPU, *UNREAD, *overrides)
        trainers.append(trainer)
        for _ in range(steps):
            trainer._train_step()
        torch.cuda.synchronize()
        return trainer

    yield make
    for trainer in trainers:
        trainer.loader.close()
