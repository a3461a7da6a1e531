"""Most likely cause of a slow run, from what every run measures."""

import json
import re
import shlex

import pytest
import yaml

from graphmoe.report.causes import causes, likely, more
from graphmoe.report.charts import expert_charts, speed_charts
from graphmoe.report.page import segments_section, trace_of, write_report
from graphmoe.report.questions import NO_TRACE, times
from graphmoe.report.run_data import read_run
from graphmoe.trace.summary import SegmentTime, Summary
from tests.report.test_report import write_rows
from tests.runs import config

COMMAND = ["python", "-m", "graphmoe.train", "run.name=a b", "profile.steps=[1]"]
CPU = {"threads": 2, "usable_cores": 2, "workers_of_node": 1, "OMP_NUM_THREADS": None}


def run_of(folder, steps, summary, **facts):
    """A run of 50 s, of which the first step took 10, on a GPU unless facts of a CPU are given."""
    compiles, cpu = {"enabled": facts.pop("compiles", True)}, facts.pop("cpu", None)
    train = {"steps": 8, "val_interval": 50, "val_batches": 20}
    config = {"run": {"device": "cpu" if cpu else "cuda"}, "train": train, "compile": compiles}
    (folder / "resolved.yaml").write_text(yaml.safe_dump(config))
    (folder / "env.json").write_text(json.dumps({"command": COMMAND, **(cpu or {}), **facts}))
    write_rows(folder / "metrics.jsonl", steps)
    ended = {"steps": len(steps), "time_to_first_step_s": 10.0, **summary}
    (folder / "summary.json").write_text(json.dumps(ended))
    return read_run(folder)


def rows(*step_s, **more):
    return [{"step": n, "loss": 1.0, "step_s": each, **more} for n, each in enumerate(step_s, start=1)]


EVEN = rows(*[2.0] * 21)
"""Steps of 40 s after the first."""


@pytest.mark.parametrize(
    ("summary", "facts", "short", "said"),
    [({"data_s": 25.0}, {}, "waiting for data, 50%", "For 50% of the time the host waited for data: `dat"),
     ({"validation_s": 12.5}, {}, "validation, 20%", "Validation took 20% of the time: more than `train."),
     ({"checkpoint_s": 11.0}, {}, "checkpoints, 18%", "took 18% of the time: a larger `checkpoint."),
     ({"time_to_first_step_s": 60.0}, {}, "its start, 60%", "60% of the time (compilation 30.0 s): `comp"),
     ({}, {"cpu": {**CPU, "threads": 1, "OMP_NUM_THREADS": "1"}},
      "cores without work, 40%", "with 1 thread on 2 cores (OMP_NUM_THREADS=1): `host.threads=2`"),
     ({}, {"cpu": {**CPU, "workers_of_node": 2}}, "more threads than cores, 40%",
      "2 workers of 2 threads on 2 cores, which wait for each other: `host.threads=1`"),
     ({}, {"cpu": CPU}, "the CPU's arithmetic", "compute on a CPU, with 2 threads on 2 cores."),
     ({}, {}, "the steps themselves", "Nothing that a run always measures stands out."),
     ({}, {"compiles": False}, "nothing is compiled", "`compile.enabled=true`"),
     ({"data_s": 7.0, "validation_s": 8.0}, {}, "its start, 17%", "17% of the time (compilation")],
)  # fmt: skip
def test_the_largest_loss_of_time_is_named_with_its_key(tmp_path, summary, facts, short, said):
    (tmp_path / "compile_report.json").write_text(json.dumps({"graphs": 1, "seconds": 30.0, "recompiled": 0}))
    run = run_of(tmp_path, EVEN, summary, **facts)
    answer, sentences = times(run, NO_TRACE)
    assert answer == f"Most likely: {short}{' of the time' * ('%' in short)}" and said in sentences[0]
    assert likely(run).said == sentences[0] and len({*sentences}) == len(sentences)
    assert shlex.join([*COMMAND[:-1], "profile.steps=[6,8]"]) in sentences[-1]
    assert len([each for each in sentences if "compile.enabled=true" in each]) <= 1


def test_uneven_steps_and_full_ranks_count_by_the_time_that_they_cost(tmp_path):
    late, full = (rows(*[1.0] * 20, *[3.0] * 5, rank_load=load) for load in (1.12, 4.0))
    for steps, named in (late, ["uneven steps"]), (full, ["an overfull rank", "uneven steps"]):  # 10 s of 34
        run = run_of(tmp_path, steps, {"time_to_first_step_s": 3.0})
        assert [each.short for each in causes(run)] == named
    compiling = run_of(tmp_path, late, {"time_to_first_step_s": 28.0})  # of 62 s
    assert times(compiling, NO_TRACE)[0] == "Most likely: its start, 45% of the time"
    segments = [SegmentTime("attn", "F", 1.0, 300.0, None, [])]
    traced = Summary("a.json", None, "cpu", {}, 1, 1000.0, segments=segments)
    assert times(compiling, traced)[0] == "Most likely: its start, 45% of the time"
    assert times(run_of(tmp_path, EVEN, {}), traced)[0] == "Most in attention: 30% of a step"


@pytest.mark.parametrize(
    ("moe", "ranks", "said"),
    [({"balance": "none", "dispatcher": "symm"}, 8, "wait for it: `moe.balance=replicas` gives all of"),
     ({"balance": "none", "dispatcher": "auto"}, 8, "`moe.balance=replicas` with `moe.dispatcher=symm` "),
     ({"balance": "none", "dispatcher": "auto"}, 4, None),  # experts are on two nodes
     ({"balance": "replicas", "dispatcher": "symm"}, 8, "wait for it: more `moe.replica_slots` even it"),
     ({"dispatcher": "symm"}, 8, None)],  # an older run
)  # fmt: skip
def test_replicas_are_named_where_an_overfull_rank_could_have_them(tmp_path, moe, ranks, said):
    run = run_of(tmp_path, rows(*[2.0] * 21, rank_load=1.5), {}, workers_of_node=ranks)
    for etp in (1, 2):
        run.config.update(moe=moe, parallel={"ep": 8 // etp, "etp": etp})
        found, *_ = causes(run)
        assert found.short == "an overfull rank" and "`model.aux_loss_coef`" in found.said
        if said is None or (etp > 1 and moe["balance"] == "none"):
            assert "replica" not in found.said
        else:
            assert said in found.said


def test_a_rank_that_replicas_relieve_is_no_loss_of_time(tmp_path):
    relieved, full = (rows(*[2.0] * 21, rank_load=1.5, planned_rank_load=load) for load in (1.02, 1.2))
    assert causes(run_of(tmp_path, relieved, {})) == []
    assert "has 1.20 times the mean" in causes(run_of(tmp_path, full, {}))[-1].said


def test_replicas_are_drawn_with_the_load_that_they_leave(tmp_path):
    def charts(**more):
        steps = rows(*[2.0] * 4, rank_load=1.5, load_max_over_mean=[2.0], **more)
        found = {chart.title: chart for chart in expert_charts(run_of(tmp_path, steps, {}))}
        assert ("moved 0.25 GB" in "".join(chart.note for chart in found.values())) == bool(more)
        return {title: [trace["name"] for trace in chart.traces] for title, chart in found.items()}

    drawn = ["mean of layers", "fullest rank"]
    assert charts() == {"Fullest expert": drawn}
    found = charts(planned_rank_load=1.01, replicas=14.0, replica_gb=0.25)
    with_replicas = [*drawn, "fullest rank with replicas"]
    assert found == {"Fullest expert": with_replicas, "Replicas of experts": ["all MoE layers"]}


def test_shares_are_of_what_was_measured_and_others_are_not_named(tmp_path):
    measured = {"validation_s": 3.0, "checkpoint_s": 0.6, "data_s": 1.2}
    counts = {"graphs": 1, "seconds": 6.0, "pool_bytes": 0.0, "warmup_steps": 1, "spans": []}
    (tmp_path / "capture_report.json").write_text(json.dumps({"on": "host", "scope": "layer", **counts}))
    sentences = times(run_of(tmp_path, EVEN, measured), NO_TRACE)[1]
    steps = "75% in 20 more (2% waiting for data, 11% capture)"
    shares = f"19% up to its first step, {steps}, 6% validation, 1% checkpoints."
    assert f"Of the 53.6 s of the run: {shares}" in sentences
    (tmp_path / "summary.json").unlink()  # it was killed
    assert "of the run:" not in " ".join(times(read_run(tmp_path), NO_TRACE)[1])
    killed = [{**row, "start_s": 90.0} if row["step"] == 1 else row for row in EVEN]
    write_rows(tmp_path / "metrics.jsonl", killed)
    sentences = times(read_run(tmp_path), NO_TRACE)[1]
    assert "after 90.0 s, 69% of the time" in sentences[0] and "validation" not in " ".join(sentences)
    assert "<dd>90.0 s" in write_report(tmp_path).read_text()


def test_a_run_that_was_killed_and_went_on_has_the_shares_of_all_its_starts(tmp_path):
    steps = rows(9.0, *[2.0] * 9, 9.0, *[2.0] * 9)  # 36 s beside the first ones
    steps[0]["start_s"] = steps[10]["start_s"] = 10.0
    for row in (steps[4], steps[9], steps[19]):
        row |= {"data_s": 1.0, "validation_s": 20.0, "checkpoint_s": 4.0}
    run = run_of(tmp_path, steps, {})
    (tmp_path / "summary.json").unlink()
    said = [each.said for each in causes(read_run(tmp_path))]
    assert said[0].startswith("Validation took 47% of the time")
    stopped = {"finished": False, "steps": 10, "validation_s": 40.0}  # of an earlier stop
    (tmp_path / "summary.json").write_text(json.dumps(stopped))
    assert [each.said for each in causes(read_run(tmp_path))] == said
    shares = "28% in 18 more (2% waiting for data), 47% validation, 9% checkpoints."
    first = "16% up to the first steps of its 2 starts"
    assert f"Of the 2.1 min of the run: {first}, {shares}" in times(read_run(tmp_path), NO_TRACE)[1]
    assert run.summary["checkpoint_s"] == 12.0


def test_each_start_counts_and_its_first_step_is_in_no_rate(tmp_path):
    steps = rows(9.0, 2.0, 2.0, 7.0, 2.0, tokens_per_s=4.0)
    steps[0]["start_s"], steps[3]["start_s"] = 12.0, 8.0
    run = run_of(tmp_path, steps, {"time_to_first_step_s": 8.0})
    said = " ".join(times(run, NO_TRACE)[1])
    first = "77% up to the first steps of its 2 starts, 23% in 3 more."
    assert f"Of the 26.0 s of the run: {first}" in said
    (chart, *_) = speed_charts(run)
    assert chart.traces[0]["x"] == [2, 3, 5] and "Without the first step of each start." in chart.note
    assert "last of 2 starts" in write_report(tmp_path).read_text()


def test_a_worker_has_no_command_to_repeat_and_a_torchrun_has(tmp_path):
    run = run_of(tmp_path, EVEN, {}, command=["python", "-m", "graphmoe.worker", "resolved.yaml"])
    assert "`profile.steps=[6,8]` in the command or configuration" in times(run, NO_TRACE)[1][-1]
    started = ["python", "torchrun", "--standalone", "--nproc-per-node=2", "-m", "graphmoe.train"]
    run = run_of(tmp_path, EVEN, {}, command=[*started, "--profile.steps=[1]"])
    assert f"`{shlex.join([*started, 'profile.steps=[6,8]'])}`" in times(run, NO_TRACE)[1][-1]


@pytest.mark.parametrize(
    ("done", "total", "traced"),
    [(0, 1, [1, 1]), (0, 2, [2, 2]), (0, 3, [2, 3]), (0, 10, [8, 10]), (0, 500, [10, 12]), (40, 41, [41, 41]),
     (40, 500, [50, 52])],
)  # fmt: skip
def test_steps_to_trace_are_among_those_of_the_run(done, total, traced, tmp_path):
    run = run_of(tmp_path, [{**row, "step": row["step"] + done} for row in rows(1.0)], {})
    run.config["train"]["steps"] = total
    (word,) = re.findall(r"profile\.steps=\[.*?\]", more(run))
    assert config(f"train.steps={total}", word).profile.steps == traced  # others are refused
    assert "profile.steps=" not in segments_section(trace_of(run, 0.0))
