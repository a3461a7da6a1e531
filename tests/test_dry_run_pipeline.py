"""The dry run of a rank of a pipeline: which rank it is, what it keeps, and its messages.

tests/test_dry_run.py compares it with real ranks.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from graphmoe.plan.layout import Layout
from graphmoe.runtime.ranks import Mesh
from graphmoe.runtime.torch_compat import fake_process_group
from graphmoe.training.dry_run.collectives import CollectiveLog, WrongGroup
from graphmoe.training.dry_run.memory import MemoryLog
from graphmoe.training.dry_run.report import render
from graphmoe.training.dry_run.watch import StepWatch
from tests.test_dry_run import dry

PIPELINES = {
    "1f1b": (),
    "a large head": ("model.vocab_size=16384", "data.seq_len=4"),
    "interleaved": ("pipeline.schedule=interleaved",),
    "zbv": ("pipeline.schedule=zbv",),
    "zbv, compiled": ("pipeline.schedule=zbv", "compile.enabled=true", "model.num_dense_layers=0"),
    "no MoE layers but one of later tokens": ("model.num_dense_layers=8", "model.mtp_depth=1"),
    "beside ep": ("parallel.ep=2", "launch.fake_world=8", "train.global_batch_size=24"),
}


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * ("compiled" in name)) for name in PIPELINES]
)
def test_the_rank_that_is_shown_holds_the_most(name):
    words = (
        "launch.fake_world=4", "parallel.pp=4", "model.num_layers=8", "model.mtp_depth=0",
        "pipeline.microbatches=6", "train.global_batch_size=12", *PIPELINES[name],
    )  # fmt: skip
    shown = dry(*words)
    stage = shown["world"] // 4
    peaks = [dry(*words, f"launch.fake_rank={place * stage}")["memory"]["peak_bytes"] for place in range(4)]
    assert shown["memory"]["peak_bytes"] == peaks[shown["pipeline"]["pp_rank"]] >= 0.97 * max(peaks)
    assert shown["rank"] == shown["pipeline"]["pp_rank"] * stage


def test_a_message_outside_of_the_pipeline_is_noticed():
    with fake_process_group(8, 2):
        mesh = Mesh(Layout(dp=4, pp=2))
        log = CollectiveLog(mesh)
        right, wrong = (dist.new_group(ranks) for ranks in ([2, 6], [2, 4]))
        with StepWatch(log, MemoryLog(), has_data=True):
            dist.isend(torch.zeros(4), 6, group=right)
            dist.irecv(torch.zeros(2), 6, group=right)
            with pytest.raises(WrongGroup, match=r"a message among ranks \[2, 4\], and the pipeline has \[2"):
                dist.isend(torch.zeros(4), 4, group=wrong)
    found = [(c.operation, c.axes, c.ranks, c.bytes) for c in log.counts]
    assert found == [("send", ("pp",), (2, 6), 16), ("receive", ("pp",), (6, 2), 8)]


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p", "interleaved"])
def test_a_rank_of_a_pipeline_sends_and_receives_a_hidden_state_for_each_micro_batch(schedule):
    words = ("launch.fake_world=8", "parallel.pp=4", f"pipeline.schedule={schedule}", "model.num_layers=8")
    found = dry(*words, "model.mtp_depth=0", "launch.fake_rank=2", "train.global_batch_size=24")
    pipeline, count = found["pipeline"], found["micro_batches"]
    assert (pipeline["pp_rank"], pipeline["schedule"], count) == (1, schedule, 6)
    messages = [c for c in found["collectives"] if c["operation"] in ("send", "receive")]
    each = count * len(pipeline["stages"])
    assert {(c["phase"], c["operation"], *c["ranks"]): c["count"] for c in messages} == {
        ("forward", "receive", 0, 2): each,
        ("forward", "send", 2, 4): each,
        ("backward", "receive", 4, 2): each,
        ("backward", "send", 2, 0): each,
    }
    assert {c["bytes"] for c in messages} == {2 * 16 * 16 * 4}


def test_what_schedules_keep_is_what_their_tables_say():
    words = ("launch.fake_world=4", "parallel.pp=4", "model.num_layers=4", "model.mtp_depth=0")
    words = (*words, "launch.fake_rank=0", "pipeline.layout=Et|t|t|tL", "pipeline.microbatches=12")

    def kept(schedule: str) -> int:
        found = dry(*words, "train.global_batch_size=24", f"pipeline.schedule={schedule}")
        return found["memory"]["at_peak_bytes"]["forward"]

    assert kept("gpipe") == pytest.approx(3 * kept("1f1b"), rel=0.03)  # 12 micro-batches, and 4


def test_the_report_names_the_stages_of_the_rank():
    found = dry("launch.fake_world=4", "parallel.pp=2", "pipeline.layout=Ett|mL", "launch.fake_rank=3")
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render(found))
    text = capture.get()
    assert "rank 1 of the pipeline: stage 1 (mL) of Ett|mL, pipeline.schedule=1f1b" in text
    assert "launch.fake_rank=2*n shows rank n" in text and re.search("│ send +│ pp", text)
