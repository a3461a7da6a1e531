"""Layers shared out to two GPUs: each schedule trains as one GPU does, in bf16; gradients: test_layouts_gpu.

Two ranks share the GPU where there is one.
"""

from pathlib import Path

import pytest
import torch

from graphmoe.runtime.pipeline.recorder import FILE_NAME, read_timelines
from graphmoe.runtime.ranks import Ranks
from graphmoe.training.step_rows import SCALARS
from tests.distributed.ranks import Job, share_gpus
from tests.distributed.training import Outcome, Training
from tests.gpu.tiny import GPU
from tests.tolerances import assert_forward_close

BASE = (
    *GPU, "model.num_layers=4", "model.mtp_depth=1", "train.steps=6", "train.val_interval=3",
    "train.log_interval=3", "train.global_batch_size=16", "train.micro_batch_size=2",
    "optim.schedule=constant",
)  # fmt: skip
EAGER, COMPILED = "compile.enabled=false", "compile.enabled=true"
ALONE = {
    EAGER: (*BASE, EAGER),
    COMPILED: (*BASE, COMPILED),
    "tied": (*BASE, EAGER, "model.tie_embeddings=true"),
}
"""Runs of one GPU; the schedule is the subject of most others, so few compile."""
RUNS = {
    **{name: (EAGER, f"pipeline.schedule={name}") for name in ("gpipe", "interleaved", "v_half", "v_min")},
    "tied": (EAGER, "model.tie_embeddings=true"),
    **{name: (COMPILED, f"pipeline.schedule={name}") for name in ("1f1b", "zbv", "dualpipe_v")},
    **{
        f"{name} on lanes": (
            COMPILED, f"pipeline.schedule={name}", "graph.scope=layer", "graph.warmup_steps=2",
        )
        for name in ("1f1b", "zbv", "dualpipe_v")
    },
    "recorded": (COMPILED, "pipeline.schedule=zb1p", "profile.pipeline=true"),
}  # fmt: skip
if not share_gpus(2):
    RUNS["one graph"] = (COMPILED, "graph.scope=full_iteration", "graph.warmup_steps=2")
LIKE = {name: "tied" if name == "tied" else words[0] for name, words in RUNS.items()}
"""The run of one GPU that each is compared with."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder) -> dict[str, list[Outcome]]:
    cases = {name: Training((*BASE, "parallel.pp=2", *words)) for name, words in RUNS.items()}
    return Job(folder, cases, device="cuda").results(seconds=500)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, Outcome]:
    return {name: Training(words)(Ranks(), tmp_path_factory.mktemp("alone")) for name, words in ALONE.items()}


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_norms_of_both_ranks_are_those_of_one_gpu(ranks, alone, name):
    wanted, (first, second) = alone[LIKE[name]], ranks[name]
    assert torch.equal(first.rows, second.rows)
    for scalar in ("loss", "mtp_loss", "grad_norm"):
        place = SCALARS.index(scalar)
        assert_forward_close(first.rows[:, place].bfloat16(), wanted.rows[:, place])
    assert_forward_close(first.val_losses.bfloat16(), wanted.val_losses)


@pytest.mark.parametrize("name", RUNS)
def test_ranks_hold_the_same_embedding_where_both_have_it(ranks, name):
    first, second = (found.weights for found in ranks[name])
    common = first.keys() & second.keys()
    on_a_v = name.startswith(("zbv", "dualpipe_v", "v_"))  # whose first rank has the last stage too
    assert common == (set() if on_a_v else {"embed.weight"})
    assert all(torch.equal(first[key], second[key]) for key in common)


def test_recorded_steps_have_the_spans_and_the_peak_of_each_gpu(ranks, folder):
    timelines = read_timelines(folder / "recorded" / FILE_NAME)
    assert [*timelines] == [3, 6]
    for timeline in timelines.values():
        assert len([span for span in timeline.spans if span.track == "compute"]) == 2 * 3 * 8
        assert timeline.peak_bytes is not None and min(timeline.peak_bytes) > 0
        assert 0 < timeline.bubble < 1
