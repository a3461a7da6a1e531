"""Report of a run: the contents of its page, and the reasons it gives for what is missing."""

import json
import logging
import math
import re
import sys
from pathlib import Path

import pytest
import yaml

import graphmoe.runtime.capture.capture
import graphmoe.runtime.compile.report
import graphmoe.runtime.pipeline.recorder
from graphmoe.config.schema import ConfigError
from graphmoe.plan.plan import plan_of
from graphmoe.project.memory import allocated_bytes, exact_memory, projected_memory
from graphmoe.report import __main__ as report
from graphmoe.report.charts import (
    KINDS,
    MAX_CELLS,
    MAX_FRAMES,
    MAX_POINTS,
    OUTSIDE_ALLOCATOR,
    Curve,
    curve,
    curves_chart,
    loads_chart,
    memory_remarks,
    projected_chart,
    thinned,
)
from graphmoe.report.comparison import config_differences, names_of, numbers
from graphmoe.report.page import segments_section, write_report
from graphmoe.report.run_data import read_run
from graphmoe.run import files
from graphmoe.worker import leave_report
from tests.kineto import FACTS, two_steps
from tests.runs import config

ROWS = [
    {"step": 0, "val_loss": 9.0},
    *(
        {"step": n, "loss": 9.0 - n, "lr": 0.5, "grad_norm": 2.0, "step_s": n, "tokens_per_s": 800.0 / n,
         "tflops": 1.0, "mfu": None, "memory_gib": float(n), "balance_loss": 1.0, "router_entropy": 1.25,
         "load_max_over_mean": [1.5, 2.0], "rank_load": 1.0, "skipped_total": 0}
        for n in (1, 2, 3)
    ),
]  # fmt: skip

APART = "outside the allocator"


def run_in(folder: Path, lr: str = "0.1") -> Path:
    """A run that was killed in its fourth step of 9, on 4 ranks of 2 x 2."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {"run": {"name": "killed", "device": "cuda"}, "train": {"steps": 9}, "optim": {"lr": lr},
             "parallel": {"tp": 2, "cp": 1, "pp": 1, "ep": 4, "etp": 1}, "model": {"num_experts": 4},
             "graph": {"scope": ["attn", "<b>"]}}  # fmt: skip
    (folder / "resolved.yaml").write_text(yaml.safe_dump(plain))
    (folder / "env.json").write_text(json.dumps({"num_workers": 4, "device": "some GPU", "command": ["a b"]}))
    (folder / "metrics.jsonl").write_text("\n".join([*map(json.dumps, ROWS), '{"step": 4, "lo']))
    return folder


def outside_scripts(page: Path) -> str:
    return re.sub(r"<script.*?</script>", "", page.read_text(), flags=re.DOTALL)


def test_files_have_the_names_that_their_writers_give_them():
    assert files.COMPILE_FILE == graphmoe.runtime.compile.report.REPORT_FILE
    assert files.CAPTURE_FILE == graphmoe.runtime.capture.capture.REPORT_FILE
    assert files.PIPELINE_FILE == graphmoe.runtime.pipeline.recorder.FILE_NAME


def test_a_run_that_was_killed_has_a_page_of_what_is_there(tmp_path):
    page = write_report(run_in(tmp_path))
    run = read_run(tmp_path)
    assert page == tmp_path / "report.html" and run.unreadable == []
    assert (run.state, run.layout(), run.name) == ("not finished, 3 of 9 steps", "dp 2, tp 2, ep 4", "killed")
    assert run.tokens_per_s_per_rank() == (400 + 800 / 3) / 2 / 4  # of steps 2 and 3
    text = outside_scripts(page)
    expected = [
        "4 x some GPU",
        "dp 2, tp 2, ep 4",
        "not finished, 3 of 9 steps",
        "3.00 GiB",
        "6.0000",
        "optim.lr",
    ]
    expected += [
        "profile.steps=[10,12]",
        "log.peak_tflops",
        "&#x27;a b&#x27;",
        "graph.scope=[attn,&lt;b&gt;]",
    ]
    expected += ["no expert_load.jsonl", "no report of what it compiled"]
    for said in expected:
        assert said in text, said
    assert "<b>" not in text and not re.search(r"(src=|href=(?!\"#))|url\(|@import", text)


def test_a_folder_without_steps_or_with_damaged_files_has_a_page_that_says_so(tmp_path):
    (tmp_path / "resolved.yaml").write_text("run: {name: young}\n")
    (tmp_path / "env.json").write_text("{")
    (tmp_path / "compile_report.json").write_text("[]")
    text = outside_scripts(write_report(tmp_path))
    for words in ("env.json is no JSON", "compile_report.json: expected object, found array"):
        assert words in text.split("Not readable: ")[1]
    assert "No step of training" in text
    assert "<figure" not in text and "Plotly" not in (tmp_path / "report.html").read_text()


def test_a_summary_of_the_end_counts_more_than_metrics_and_metrics_that_went_on_more_than_it(tmp_path):
    ended = {"finished": True, "steps": 9, "peak_memory_gib": 7.5, "median_tokens_per_s": 8.0}
    (run_in(tmp_path) / "summary.json").write_text(json.dumps(ended))
    run = read_run(tmp_path)
    assert (run.state, run.summary["peak_memory_gib"]) == ("finished, 9 steps", 7.5)
    assert run.tokens_per_s_per_rank() == 2.0
    stopped = {"finished": False, "stopped_by": "SIGTERM", "steps": 2, "final_loss": 7.0,
               "final_val_loss": 1.5, "median_tokens_per_s": 400.0, "peak_memory_gib": 7.5,
               "time_to_first_step_s": 4.0}  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps(stopped))
    run = read_run(tmp_path)
    assert run.state == "not finished, 3 of 9 steps" and run.summary["final_loss"] == 6.0
    assert run.summary["final_val_loss"] is None and run.tokens_per_s_per_rank() == (400 + 800 / 3) / 2 / 4
    assert (run.summary["peak_memory_gib"], run.summary["time_to_first_step_s"]) == (7.5, 4.0)  # of all ranks
    (tmp_path / "summary.json").write_text(json.dumps({**stopped, "steps": 3}))
    assert read_run(tmp_path).state == "stopped by SIGTERM, 3 of 9 steps"


def test_a_long_curve_keeps_its_ends_and_every_peak_and_leaves_out_what_is_not_finite():
    values = [0.0] * 100_000
    values[54_321], values[77_777] = 9.0, -9.0
    whole = Curve("loss", list(range(100_000)), values)
    thin = thinned(whole)
    assert len(thin.steps) <= MAX_POINTS and (thin.steps[0], thin.steps[-1]) == (0, 99_999)
    assert {9.0, -9.0} < set(thin.values) and thin.steps == sorted(thin.steps)
    assert thin.values[thin.steps.index(54_321)] == 9.0
    (chart,) = curves_chart("Loss", "nats", [whole])
    assert f"{len(thin.steps):,} of 100,000 points" in chart.note
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}, {"step": 3}, {"step": 4, "loss": math.inf}]
    assert curve("loss", rows, "loss") == Curve("loss", [1], [2.0])
    assert curves_chart("Loss", "nats", [curve("lr", rows, "lr")]) == []


@pytest.mark.parametrize(("layers", "experts", "frames"), [(2, 4, MAX_FRAMES), (60, 384, MAX_CELLS // 23040)])
def test_a_heat_map_has_few_pictures_among_them_the_first_and_the_last(layers, experts, frames):
    rows = [{"step": n, "steps": 5, "load": [[n / 100] * experts] * layers} for n in range(5, 1001, 5)]
    (chart,) = loads_chart(rows)
    assert len(chart.frames.values) == len(chart.frames.names) == frames
    assert (chart.frames.names[0], chart.frames.names[-1]) == ("5", "1000")
    assert chart.frames.values[-1] == chart.traces[0]["z"] == rows[-1]["load"]
    assert f"{frames} of 200 recorded" in chart.note
    (chart,) = loads_chart([{"step": 3, "steps": 3, "load": [[0.5, 1.5]]}])
    assert list(chart.frames.names) == ["3"] and "expert 1 of MoE layer 0 with 1.5" in chart.alt
    assert loads_chart([]) == []


@pytest.mark.parametrize("words", [(), ("parallel.ep=2", "moe.dispatcher=symm")], ids=["one rank", "ep"])
def test_projected_memory_is_beside_the_measured_and_what_the_allocator_lacks_is_apart(words, tmp_path):
    compiled = config("compile.enabled=true", *words)
    plan = plan_of(compiled, 2 if words else 1)
    document = projected_memory(plan)
    (place,) = exact_memory(plan, on_nvidia=True)
    (kinds,) = document["places"]
    assert tuple(OUTSIDE_ALLOCATOR) == graphmoe.project.memory.OUTSIDE_ALLOCATOR
    assert set(kinds) == {*KINDS, *OUTSIDE_ALLOCATOR, "total"}
    assert sum(size for kind, size in kinds.items() if kind != "total") == pytest.approx(kinds["total"])
    run_in(tmp_path).joinpath("projection.json").write_text(json.dumps(document))
    (chart,) = projected_chart(read_run(tmp_path))
    rows = ("projected", APART, "measured")
    bars = {row: sum(trace["x"][0] for trace in chart.traces if trace["y"] == [row]) for row in rows}
    outside = place.buffers["communication"] + place.buffers["dispatch"]
    assert bars["projected"] * 2**30 == pytest.approx(place.total - outside) == allocated_bytes(place)
    assert bars[APART] * 2**30 == pytest.approx(outside) and bars["measured"] == 3.0
    if words:
        assert min(place.buffers["communication"], place.buffers["dispatch"]) > 0
        assert "communication and memory shared for dispatch" in chart.note


def test_the_page_says_why_a_run_is_not_projected(tmp_path):
    document = projected_memory(plan_of(config(), 1))
    run_in(tmp_path).joinpath("projection.json").write_text(json.dumps(document))
    assert "use compile.enabled=true" in memory_remarks(read_run(tmp_path))
    assert projected_chart(read_run(tmp_path)) == []


def test_times_by_segment_say_of_which_steps_and_rank_they_are_and_a_large_trace_is_left(tmp_path):
    trace = two_steps().write(run_in(tmp_path) / "profile" / "rank3.trace.json.gz", FACTS | {"rank": 3})
    text = segments_section(read_run(tmp_path), max_trace_bytes=trace.stat().st_size)
    assert "Mean of 2 steps of rank 3, 0.95 ms each" in text
    text = segments_section(read_run(tmp_path), max_trace_bytes=4)
    assert f"python -m graphmoe.report run={tmp_path}" in text and "is not read" in text


def test_a_comparison_names_what_differs(tmp_path):
    runs = [read_run(run_in(tmp_path / name / "run", lr)) for name, lr in (("a", "0.1"), ("b", "0.2"))]
    assert names_of(runs) == ["a/run", "b/run"]
    assert config_differences(runs) == [["optim.lr", "0.1", "0.2"]]
    rows = {row[0]: row[1:] for row in numbers(runs)}
    assert rows["final loss"] == ["6.0000"] * 2 and "MFU, median" not in rows
    assert rows["peak memory, GiB"] == ["3.00"] * 2 and rows["steps"] == ["3", "3"]


def test_the_command_writes_where_it_is_told(tmp_path, capsys, monkeypatch):
    run_in(tmp_path / "a")
    run_in(tmp_path / "b", "0.2")
    monkeypatch.chdir(tmp_path)
    report.main(["run=a"])
    report.main(["runs=a,b"])
    report.main(["runs=a,b", "out=other.html", "format=json"])
    said = capsys.readouterr().out
    assert said.startswith("report: a/report.html\nreport: comparison.html\n")
    assert json.loads(said.split("\n", 2)[2]) == {"page": "other.html"}
    assert (tmp_path / "a" / "report.html").is_file()
    assert (tmp_path / "other.html").read_bytes() == (tmp_path / "comparison.html").read_bytes()


WRONG = (
    ([], "nothing to report; use run="),
    (["run=a", "runs=a,b"], "two ways to name runs"),
    (["runs=a"], "runs=a is one; use run=a"),
    (["run=nowhere"], "nowhere is no folder"),
    (["run=."], ". has no resolved.yaml or metrics.jsonl"),
    (["run=a", "out=a"], "out=a is a folder; name a file, such as out=a/report.html"),
    (["run=a", "out=none/b.html"], "out=none/b.html: there is no folder none; make it, or name another"),
)


def test_what_the_command_cannot_do_is_said(tmp_path, monkeypatch):
    run_in(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    for words, said in WRONG:
        with pytest.raises(ConfigError, match=re.escape(said)):
            report.main(words)


def test_without_plotly_the_command_ends_and_a_run_is_warned_and_goes_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigError, match=r"^no page: .*; pip install plotly$"):
        report.main([f"run={run_in(tmp_path)}"])
    with caplog.at_level(logging.WARNING):
        leave_report(run_in(tmp_path / "a"))
        leave_report(tmp_path / "none")
    first, second = (record.getMessage() for record in caplog.records)
    assert "pip install plotly. python -m graphmoe.report run=" in first and "\n" not in first
    assert "is no folder" in second and f"run={tmp_path}/none makes it" in second
    assert not any(record.exc_info for record in caplog.records)
