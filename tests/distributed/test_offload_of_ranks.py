"""State and activations in host memory on two ranks: the bits of those on the device, also after a resume."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.layouts import Case
from tests.distributed.ranks import run_ranks
from tests.runs import assert_same_state

BF16 = ("precision.compute=bf16",)
ON = "optim.offload=true"
KINDS = {
    "dp": (Case(2, "", model=BF16), ON),
    "ep, int8": (Case(2, "ep=2", model=(*BF16, "optim.moment_dtype=int8")), ON),
    "muon": (Case(2, "", model=("optim.name=muon", *BF16)), ON),
    "pp": (Case(2, "pp=2", "1f1b"), "recompute.offload=[attn,mlp,moe_router,moe_experts]"),
    "pp, compiled, wgrad apart": (
        Case(2, "pp=2", "zb1p", mode="traced"),
        "recompute.offload=[attn,moe_experts]",
    ),
    "ep, compiled": (Case(2, "ep=2", mode="traced"), "recompute.offload=[attn,moe_dispatch,moe_experts]"),
}
SAVED = ("checkpoint.enabled=true", "checkpoint.interval=2", "checkpoint.keep_last=9", "train.steps=4")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder: Path = tmp_path_factory.mktemp("two")
    cases = {}
    for kind, (case, word) in KINDS.items():
        for name, words in (("off", ()), ("on", (word,))):
            cases[f"{kind} {name}"] = replace(case, model=(*SAVED, *case.model, *words)).training
        start = f"checkpoint.resume_from={folder}/{kind} off/checkpoints/step_00000002"
        if word == ON:
            cases[f"{kind} resumed"] = replace(case, model=(*SAVED, *case.model, word, start)).training
    return run_ranks(folder, cases)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_with_what_is_in_host_memory_have_the_same_bits(runs, kind):
    plain = runs[f"{kind} off"]
    for name, first in ((f"{kind} on", 0), (f"{kind} resumed", 2)):
        for found, wanted in zip(runs.get(name, plain), plain, strict=True):
            first = 0 if found is wanted else first
            assert found.step == wanted.step == 4
            assert torch.equal(found.rows.nan_to_num(9.0), wanted.rows[first:].nan_to_num(9.0))
            assert_same_state(found.weights, wanted.weights)
            assert_same_state(found.state, wanted.state)
