"""Most likely cause of a slow run, from what every run measures."""

import json
import shlex
from typing import Any

import pytest
import yaml

from graphmoe.report.causes import causes, likely
from graphmoe.report.charts import speed_charts
from graphmoe.report.page import write_report
from graphmoe.report.questions import NO_TRACE, times
from graphmoe.report.run_data import RunData, read_run
from graphmoe.run.metrics_file import Row

COMMAND = ["python", "-m", "graphmoe.train", "run.name=a b", "profile.steps=[1]"]
CPU = {"threads": 2, "usable_cores": 2, "workers_of_node": 1, "OMP_NUM_THREADS": None}


def run_of(folder, steps: list[Row], summary: dict[str, object], **facts: Any) -> RunData:
    """A run of 60 s, of which the first step took 10, on a GPU unless facts of a CPU are given."""
    compiles, cpu = {"enabled": facts.pop("compiles", True)}, facts.pop("cpu", None)
    train = {"steps": 8, "val_interval": 50, "val_batches": 20}
    config = {"run": {"device": "cpu" if cpu else "cuda"}, "train": train, "compile": compiles}
    (folder / "resolved.yaml").write_text(yaml.safe_dump(config))
    (folder / "env.json").write_text(json.dumps({"command": COMMAND, **(cpu or {}), **facts}))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in steps))
    ended = {"steps": len(steps), "run_s": 60.0, "time_to_first_step_s": 10.0, **summary}
    (folder / "summary.json").write_text(json.dumps(ended))
    return read_run(folder)


def rows(*step_s: float, **more: object) -> list[Row]:
    return [{"step": n, "loss": 1.0, "step_s": each, **more} for n, each in enumerate(step_s, start=1)]


EVEN = rows(*[2.0] * 21)
"""Steps of 40 s after the first."""


@pytest.mark.parametrize(
    ("summary", "facts", "short", "said"),
    [
        ({"data_s": 30.0}, {}, "waiting for data", "For 50% of the time the host waited for data: `data.pre"),
        ({"validation_s": 12.0}, {}, "validation", "Validation took 20% of the time: more than `train."),
        ({"checkpoint_s": 9.0}, {}, "checkpoints", "took 15% of the time: a larger `checkpoint.interval`"),
        ({"time_to_first_step_s": 42.0}, {}, "its start", "70% of the time (compilation 30.0 s): `comp"),
        ({}, {"cpu": {**CPU, "threads": 1, "OMP_NUM_THREADS": "1"}}, "cores without work",
         "with 1 thread on 2 cores (OMP_NUM_THREADS=1): `host.threads=2`"),
        ({}, {"cpu": {**CPU, "workers_of_node": 2}}, "more threads than cores",
         "2 workers of 2 threads on 2 cores, which wait for each other: `host.threads=1`"),
        ({}, {"cpu": CPU}, "the CPU's arithmetic", "compute on a CPU, with 2 threads on 2 cores."),
        ({}, {}, "the steps themselves", "Nothing that a run always measures stands out."),
        ({"median_mfu": 0.2}, {}, "the steps themselves", "stands out: a step takes 5.0 times the floor."),
        ({}, {"compiles": False}, "nothing is compiled", "`compile.enabled=true`"),
        ({"data_s": 7.0, "validation_s": 8.0}, {}, "validation", "13% of the time"),
    ],
)  # fmt: skip
def test_the_largest_loss_of_time_is_named_with_its_key(tmp_path, summary, facts, short, said):
    (tmp_path / "compile_report.json").write_text(json.dumps({"graphs": 1, "seconds": 30.0, "recompiled": 0}))
    run = run_of(tmp_path, EVEN, summary, **facts)
    answer, sentences = times(run, NO_TRACE)
    assert answer == f"Most likely: {short}" and said in sentences[0]
    assert likely(run).said == sentences[0] and len({*sentences}) == len(sentences)
    assert shlex.join([*COMMAND[:-1], "profile.steps=[6,8]"]) in sentences[-1]


def test_uneven_steps_and_full_ranks_count_by_the_time_that_they_cost(tmp_path):
    late = rows(*[1.0] * 20, *[3.0] * 5, rank_load=1.2)  # 10 s of the 34 of its steps
    assert [each.short for each in causes(run_of(tmp_path, late, {}))] == ["uneven steps"]
    late = rows(*[1.0] * 20, *[3.0] * 5, rank_load=4.0)
    assert [each.short for each in causes(run_of(tmp_path, late, {}))] == ["an overfull rank", "uneven steps"]


def test_shares_are_of_what_was_measured_and_others_are_not_named(tmp_path):
    measured = {"validation_s": 3.0, "checkpoint_s": 0.6, "data_s": 1.2}
    (tmp_path / "capture_report.json").write_text(
        json.dumps(
            {
                "on": "host",
                "scope": "layer",
                "graphs": 1,
                "seconds": 6.0,
                "pool_bytes": 0.0,
                "warmup_steps": 1,
                "spans": [],
            }
        )  # fmt: skip
    )
    sentences = times(run_of(tmp_path, EVEN, measured), NO_TRACE)[1]
    assert "The run had its first step after 10.0 s; 20 more took 40.0 s." in sentences
    shares = "17% up to its first step, 5% validation, 1% checkpoints, 2% waiting for data, 10% capture."
    assert f"Of the 60.0 s of the run: {shares}" in sentences
    (tmp_path / "summary.json").unlink()  # it was killed
    assert "60.0 s" not in " ".join(times(read_run(tmp_path), NO_TRACE)[1])
    killed = [{**row, "start_s": 90.0} if row["step"] == 1 else row for row in EVEN]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in killed))
    assert "after 90.0 s, 69% of the time" in times(read_run(tmp_path), NO_TRACE)[1][0]


def test_each_start_counts_and_its_first_step_is_in_no_rate(tmp_path):
    steps = rows(9.0, 2.0, 2.0, 7.0, 2.0, tokens_per_s=4.0)
    steps[0]["start_s"], steps[3]["start_s"] = 12.0, 8.0
    run = run_of(tmp_path, steps, {"time_to_first_step_s": 8.0})
    said = " ".join(times(run, NO_TRACE)[1])
    assert (
        "Its steps are of 2 starts, whose first ones came after 12.0 s and 8.0 s; 3 more took 6.0 s." in said
    )
    assert "Of the 60.0 s of the last start: 13% up to its first step" in said
    (chart, *_) = speed_charts(run)
    assert chart.traces[0]["x"] == [2, 3, 5] and "Without the first step of each start." in chart.note
    assert "last of 2 starts" in write_report(tmp_path).read_text()


def test_a_worker_has_no_command_to_repeat(tmp_path):
    run = run_of(tmp_path, EVEN, {}, command=["python", "-m", "graphmoe.worker", "resolved.yaml"])
    assert "`profile.steps=[6,8]` beside the other words" in times(run, NO_TRACE)[1][-1]
