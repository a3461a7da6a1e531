"""Layers shared out to two GPUs: each schedule trains as one GPU does, on bf16 compiled units.

Two ranks share the GPU where there is one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graphmoe.world import World
from runtime.pipeline.recording_file import FILE_NAME, read
from tests.distributed.ranks import Job, share_gpus
from tests.distributed.training import Outcome, Training, without_rank_load
from tests.gpu.tiny import GPU
from tests.tolerances import assert_forward_close

BASE = (
    *GPU, "model.num_layers=4", "model.mtp_depth=1", "train.steps=6", "train.val_interval=3",
    "train.log_interval=3", "train.global_batch_size=16", "train.micro_batch_size=2",
    "optim.schedule=constant", "compile.enabled=true",
)  # fmt: skip
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv", "v_min")
RUNS = {
    **{name: (*BASE, "parallel.pp=2", f"pipeline.schedule={name}") for name in SCHEDULES},
    "tied": (*BASE, "parallel.pp=2", "model.tie_embeddings=true"),
    **{
        f"{name} on lanes": (
            *BASE, "parallel.pp=2", f"pipeline.schedule={name}", "graph.scope=layer", "graph.warmup_steps=2",
        )
        for name in ("1f1b", "zbv")
    },
    "recorded": (*BASE, "parallel.pp=2", "pipeline.schedule=zb1p", "profile.pipeline=true"),
}  # fmt: skip
if not share_gpus(2):
    RUNS["one graph"] = (*BASE, "parallel.pp=2", "graph.scope=full_iteration", "graph.warmup_steps=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def outcomes(folder) -> dict[str, list[Outcome]]:
    """Of two ranks; that they end at all shows that no message waits for ever."""
    cases = {name: Training(words) for name, words in RUNS.items()}
    return Job(folder, cases, device="cuda").results(seconds=400)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, Outcome]:
    tied = (*BASE, "model.tie_embeddings=true")
    return {
        name: Training(words)(World(), tmp_path_factory.mktemp("alone"))
        for name, words in (("untied", BASE), ("tied", tied))
    }


@pytest.mark.parametrize("name", RUNS)
def test_losses_of_both_ranks_are_those_of_one_gpu(outcomes, alone, name):
    wanted = alone["tied" if name == "tied" else "untied"]
    first, second = outcomes[name]
    assert torch.equal(first.rows, second.rows)
    assert_forward_close(without_rank_load(first.rows)[:, 0].bfloat16(), without_rank_load(wanted.rows)[:, 0])
    assert_forward_close(first.val_losses.bfloat16(), wanted.val_losses)


@pytest.mark.parametrize("name", RUNS)
def test_ranks_hold_the_same_embedding_where_both_have_it(outcomes, name):
    first, second = (found.weights for found in outcomes[name])
    common = first.keys() & second.keys()
    on_a_v = name.startswith(("zbv", "v_min"))  # whose first rank has the last stage too
    assert common == (set() if on_a_v else {"embed.weight"})
    assert all(torch.equal(first[key], second[key]) for key in common)


def test_recorded_steps_have_the_spans_and_the_peak_of_each_gpu(outcomes, folder):
    timelines = read(folder / "recorded" / FILE_NAME)
    assert [*timelines] == [3, 6]
    for timeline in timelines.values():
        assert len([span for span in timeline.spans if span.track == "compute"]) == 2 * 3 * 8
        assert timeline.peak_bytes is not None and min(timeline.peak_bytes) > 0
        assert 0 < timeline.bubble < 1
