"""State in host memory on two ranks: the bits of state on the device, also after a resume."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.layouts import Case
from tests.distributed.ranks import run_ranks
from tests.runs import assert_same_state

BF16 = ("precision.compute=bf16",)
KINDS = {
    "dp": ("", BF16),
    "ep, int8": ("ep=2", (*BF16, "optim.moment_dtype=int8")),
    "muon": ("", ("optim.name=muon", *BF16)),
}
SAVED = ("checkpoint.enabled=true", "checkpoint.interval=2", "checkpoint.keep_last=9", "train.steps=4")
OFF, ON = "optim.offload=false", "optim.offload=true"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder: Path = tmp_path_factory.mktemp("two")
    cases = {}
    for kind, (layout, words) in KINDS.items():
        for value in (OFF, ON):
            cases[f"{kind} {value}"] = Case(2, layout, model=(*SAVED, *words, value)).training
        start = f"checkpoint.resume_from={folder}/{kind} {OFF}/checkpoints/step_00000002"
        cases[f"{kind} resumed"] = Case(2, layout, model=(*SAVED, *words, ON, start)).training
    return run_ranks(folder, cases)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_with_state_in_host_memory_have_the_same_bits(runs, kind):
    plain = runs[f"{kind} {OFF}"]
    for name, first in ((f"{kind} {ON}", 0), (f"{kind} resumed", 2)):
        for found, wanted in zip(runs[name], plain, strict=True):
            assert found.step == wanted.step == 4
            assert torch.equal(found.rows.nan_to_num(9.0), wanted.rows[first:].nan_to_num(9.0))
            assert_same_state(found.weights, wanted.weights)
            assert_same_state(found.state, wanted.state)
