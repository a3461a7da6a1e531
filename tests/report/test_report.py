"""Report of a run: the contents of its page, and the reasons it gives for what is missing."""

import json
import logging
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import graphmoe.runtime.capture
import graphmoe.runtime.compile.report
import graphmoe.runtime.pipeline.recorder
from graphmoe import web_page
from graphmoe.config.schema import ConfigError
from graphmoe.plan.plan import plan_of
from graphmoe.report import __main__ as report
from graphmoe.report import charts
from graphmoe.report.charts import Curve, curve, curves_chart, loads_chart, projected_chart
from graphmoe.report.comparison import column_keys, config_differences, names_of, write_comparison
from graphmoe.report.page import compile_section, segments_section, trace_of, write_report
from graphmoe.report.questions import NO_TRACE, learning, slow_ranks, speed, times
from graphmoe.report.run_data import read_run
from graphmoe.run import files
from graphmoe.training.memory import allocated_bytes, memory_of_places
from graphmoe.web_page import quoted
from graphmoe.worker import leave_report, projected_memory
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


def run_in(folder, lr="0.1"):
    folder.mkdir(parents=True, exist_ok=True)
    plain = {"run": {"name": "killed", "device": "cuda"}, "train": {"steps": 9}, "optim": {"lr": lr},
             "parallel": {"tp": 2, "cp": 1, "pp": 1, "ep": 4, "etp": 1}, "model": {"num_experts": 4},
             "graph": {"scope": ["attn", "<b>"]}}  # fmt: skip
    (folder / "resolved.yaml").write_text(yaml.safe_dump(plain))
    (folder / "env.json").write_text(json.dumps({"num_workers": 4, "device": "some GPU", "command": ["a b"]}))
    (folder / "metrics.jsonl").write_text("\n".join([*map(json.dumps, ROWS), '{"step": 4, "lo']))
    return folder


def write_rows(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def run_with(folder, **documents):
    """A run with more files, by their names without .json."""
    run_in(folder)
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    return read_run(folder)


def outside_scripts(page):
    return re.sub(r"<script.*?</script>", "", page.read_text(), flags=re.DOTALL)


def test_files_have_the_names_that_their_writers_give_them():
    assert files.COMPILE_FILE == graphmoe.runtime.compile.report.REPORT_FILE
    assert files.CAPTURE_FILE == graphmoe.runtime.capture.REPORT_FILE
    assert files.PIPELINE_FILE == graphmoe.runtime.pipeline.recorder.FILE_NAME


def test_a_run_that_was_killed_has_a_page_of_what_is_there(tmp_path):
    page = write_report(run_in(tmp_path))
    run = read_run(tmp_path)
    assert page == tmp_path / "report.html" and run.unreadable == []
    assert (run.state, run.layout(), run.name) == ("not finished, 3 of 9 steps", "dp 2, tp 2, ep 4", "killed")
    assert run.tokens_per_s_per_rank() == (400 + 800 / 3) / 2 / 4  # of steps 2 and 3
    text = outside_scripts(page)
    expected = ["4 x some GPU", "dp 2, tp 2, ep 4", "not finished, 3 of 9 steps", "3.00 GiB", "6.0000"]
    expected += ["optim.lr", "profile.steps=[7,9]", "log.peak_tflops", "&#x27;a b&#x27;"]
    expected += ["graph.scope=[attn,&lt;b&gt;]", "no expert_load.jsonl", "no report of what it compiled"]
    assert [said for said in expected if said not in text] == []
    assert "<b>" not in text and not re.search(r"(src=|href=(?!\"#))|url\(|@import", text)


def test_a_folder_without_steps_or_with_damaged_files_has_a_page_that_says_so(tmp_path):
    (tmp_path / "resolved.yaml").write_text("run: {name: young}\n")
    (tmp_path / "env.json").write_text("{")
    (tmp_path / "compile_report.json").write_text("[]")
    text = outside_scripts(write_report(tmp_path))
    unreadable = text.split("Not readable: ")[1]
    assert "env.json is not JSON" in unreadable and "No step of training" in text
    assert "compile_report.json: expected object, found array" in unreadable
    assert "<figure" not in text and 'id="plotly"' not in (tmp_path / "report.html").read_text()


def test_a_summary_of_the_end_counts_more_than_metrics_and_metrics_that_went_on_more_than_it(tmp_path):
    ended = {"finished": True, "steps": 9, "peak_memory_gib": 7.5, "median_tokens_per_s": 8.0}
    run = run_with(tmp_path, summary=ended)
    assert (run.state, run.summary["peak_memory_gib"]) == ("finished, 9 steps", 7.5)
    assert run.tokens_per_s_per_rank() == 2.0
    stopped = {"finished": False, "stopped_by": "SIGTERM", "steps": 2, "final_loss": 7.0,
               "final_val_loss": 1.5, "median_tokens_per_s": 400.0, "peak_memory_gib": 7.5,
               "time_to_first_step_s": 4.0}  # fmt: skip
    run = run_with(tmp_path, summary=stopped)
    assert run.state == "not finished, 3 of 9 steps" and run.summary["final_loss"] == 6.0
    assert run.summary["final_val_loss"] is None and run.tokens_per_s_per_rank() == (400 + 800 / 3) / 2 / 4
    assert (run.summary["peak_memory_gib"], run.summary["time_to_first_step_s"]) == (7.5, 4.0)  # of all ranks
    assert run_with(tmp_path, summary={**stopped, "steps": 3}).state == "stopped by SIGTERM, 3 of 9 steps"


def test_the_model_has_its_number_formats_and_the_products_in_8_bits_that_the_summary_counts(tmp_path):
    with (run_in(tmp_path) / "resolved.yaml").open("a") as file:
        file.write("precision: {compute: bf16, fp8: rowwise}\n")
    assert "bf16, products in 8 bits (rowwise), not finished" in outside_scripts(write_report(tmp_path))
    counts = {"fp8": "rowwise", "products_in_fp8": 7, "products_in_bf16": 2}
    (tmp_path / "summary.json").write_text(json.dumps(counts))
    assert "bf16, 7 of 9 products in 8 bits (rowwise), not" in outside_scripts(write_report(tmp_path))


def test_a_long_curve_keeps_its_ends_and_every_peak_and_leaves_out_what_is_not_finite():
    values = [0.0] * 100_000
    values[54_321], values[77_777] = 9.0, -9.0
    whole = Curve("loss", list(range(100_000)), values)
    thin = charts.thinned(whole)
    assert len(thin.steps) <= charts.MAX_POINTS and (thin.steps[0], thin.steps[-1]) == (0, 99_999)
    assert {9.0, -9.0} < set(thin.values) and thin.steps == sorted(thin.steps)
    assert thin.values[thin.steps.index(54_321)] == 9.0
    (chart,) = curves_chart("Loss", "nats", [whole])
    assert f"{len(thin.steps):,} of 100,000 points" in chart.note
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}, {"step": 3}, {"step": 4, "loss": math.inf}]
    assert curve("loss", rows, "loss") == Curve("loss", [1], [2.0])
    assert curves_chart("Loss", "nats", [curve("lr", rows, "lr")]) == []


@pytest.mark.parametrize(
    ("layers", "experts", "frames"), [(2, 4, charts.MAX_FRAMES), (60, 384, charts.MAX_CELLS // 23040)]
)
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
    (place,) = memory_of_places(plan, on_nvidia=True)
    (kinds,) = document["places"]
    assert tuple(charts.OUTSIDE_ALLOCATOR) == graphmoe.training.memory.OUTSIDE_ALLOCATOR
    assert set(kinds) == {*charts.KINDS, *charts.OUTSIDE_ALLOCATOR, "total"}
    assert sum(size for kind, size in kinds.items() if kind != "total") == pytest.approx(kinds["total"])
    (chart,) = projected_chart(run_with(tmp_path, projection=document))
    rows = ("projected", APART, "measured")
    bars = {row: sum(trace["x"][0] for trace in chart.traces if trace["y"] == [row]) for row in rows}
    outside = place.buffers["communication"] + place.buffers["dispatch"]
    assert bars["projected"] * 2**30 == pytest.approx(place.total - outside) == allocated_bytes(place)
    assert bars[APART] * 2**30 == pytest.approx(outside) and bars["measured"] == 3.0
    if words:
        assert min(place.buffers["communication"], place.buffers["dispatch"]) > 0
        assert "communication and memory shared for dispatch" in chart.note


def test_the_page_says_why_a_run_is_not_projected(tmp_path):
    run = run_with(tmp_path, projection=projected_memory(plan_of(config(), 1)))
    assert "use compile.enabled=true" in charts.memory_remarks(run) and projected_chart(run) == []


def test_times_by_segment_say_of_which_steps_and_rank_they_are_and_a_large_trace_is_left(tmp_path, caplog):
    caplog.set_level("INFO")
    trace = two_steps().write(run_in(tmp_path) / "profile" / "rank3.trace.json.gz", FACTS | {"rank": 3})
    run = read_run(tmp_path)
    text = segments_section(trace_of(run, max_trace_bytes=trace.stat().st_size))
    assert "Mean of 2 steps of rank 3, 0.95 ms each" in text
    text = segments_section(trace_of(run, max_trace_bytes=4))
    assert f"python -m graphmoe.report run={tmp_path}" in text and "is not read" in text
    assert caplog.messages == ["reading rank3.trace.json.gz, 0.0 MiB, for the report"]


def told(answer):
    return " ".join([answer[0], *answer[1]])


def with_losses(folder, losses, *validations, **more):
    rows = [{**ROWS[1], "step": n, "loss": loss, **more} for n, loss in enumerate(losses, start=1)]
    rows += [{"step": step, "val_loss": loss} for step, loss in validations]
    write_rows(run_in(folder) / "metrics.jsonl", rows)
    return read_run(folder)


FALLING = [9.0 - 0.1 * n + 0.01 * (n % 3) for n in range(60)]
NOISY = FALLING + [3.1, 3.3] * 42 + [3.0, 3.3] * 18


@pytest.mark.parametrize(
    ("losses", "said"),
    [(FALLING, "Yes, and it still falls"), (FALLING + [3.1, 3.2] * 60, "Yes, but it falls no more"),
     (NOISY, "is 0.050 below that of the 36 before, which is "), ([], "Not known yet"),
     (FALLING[:30] + [6.0, 6.3] * 5 + [6.0, 6.4] * 5,
      "10 steps is 0.050 above that of the 10 before, which is within its noise: 50 steps are too few"),
     (FALLING[:20], "20 steps are too few to say whether it still falls."),
     (FALLING + [3.0] * 40 + [3.5] * 30, "Yes, but it rises at the end"),
     ([9.0, 9.1] * 30, "No: the loss stays at 9.050"),
     ([*FALLING, None, None], "No: the loss is not finite It is no number since step 61")],
)  # fmt: skip
def test_a_report_says_whether_the_run_learns(losses, said, tmp_path):
    assert said in told(learning(with_losses(tmp_path, losses)))


def test_a_validation_that_was_better_before_is_no_learning_any_more(tmp_path):
    said = told(learning(with_losses(tmp_path, [2.0] * 30, (0, 9.0), (10, 2.5), (30, 2.75), epoch=3.0)))
    assert "Not any more: validation is best at step 10" in said and "read its data 3.0 times" in said
    assert "validation loss is 0.75 above training loss" in said


def test_a_validation_that_still_falls_counts_more_than_noisy_training(tmp_path):
    for last, said in ((3.4, "Yes, and it still falls"), (3.495, "Yes, but it falls no more")):
        found = told(learning(with_losses(tmp_path, NOISY, (0, 9.0), (140, 3.5), (180, last))))
        assert found.startswith(said) and ("validation went from 3.500 to 3.400" in found) == (last == 3.4)


def test_the_floor_is_the_models_arithmetic_at_the_peak_or_unknown(tmp_path):
    run = with_losses(tmp_path, [3.0] * 4, step_s=2.0, mfu=0.25, tflops=100.0, tokens_per_s=800.0)
    assert speed(run)[0] == "4.0 times the floor"
    assert "200 tokens/s on each GPU" in told(speed(run)) and "peak of 400 TFLOP/s" in told(speed(run))
    assert "would take 0.5 s" in told(speed(run))
    assert "log.peak_tflops" in told(speed(with_losses(tmp_path, [3.0] * 4)))


def test_where_time_is_lost_is_said_with_what_to_try(tmp_path):
    run = with_losses(tmp_path, [3.0] * 40, step_s=2.0, rank_load=1.5)
    assert times(run, NO_TRACE)[0] == "Most likely: an overfull rank, 33% of the time"
    assert told(times(run, NO_TRACE)).count("1.50 times the mean") == 1
    two_steps().write(tmp_path / "profile" / "rank3.trace.json.gz", FACTS | {"rank": 3})
    assert (found := trace_of(run, math.inf)).on == "gpu"
    said = told(times(run, replace(found, idle=0.4, step_ms=2.0, exposed_ms=0.5, launches=30, launch_ms=1.0)))
    assert "idle for 40% of a step, with 30 launches in 1 ms of the host" in said
    assert "`graph.scope=full_iteration`" in said and "For 25% of a step ranks communicate" in said
    assert "pipeline.ep_overlap=true" in said and "Nothing stands out" not in said
    unit = replace(found.segments[0], segment="attn..moe_combine", ms=1.0)
    most = times(run, replace(found, idle=0.0, step_ms=2.0, segments=[unit]))[0]
    assert most == "Most in the compiled unit from attention to the experts' combine: 50% of a step"
    calm = with_losses(tmp_path, [3.0] * 40, step_s=2.0, rank_load=1.0)
    assert "Nothing stands out" in told(times(calm, replace(found, idle=0.01, exposed_ms=0.0)))


def test_a_slow_rank_is_marked_in_the_page(tmp_path):
    assert [*slow_ranks(with_losses(tmp_path, [3.0] * 3))] == []
    rows = [{"slowest_rank": 3, "slow_ranks": [3]}, {"slow_ranks": [3, 7]}, {}]
    write_rows(tmp_path / "metrics.jsonl", [{**ROWS[1], "step": n, **row} for n, row in enumerate(rows, 5)])
    first, second = slow_ranks(read_run(tmp_path))
    assert first.startswith(
        "Warning: rank 3 was slow up to step 6: its own work took over 1.2 times the median"
    )
    assert "The log of step 5 has" in first and second.startswith("Warning: rank 7 was slow up to step 6")
    assert "rank 7 was slow up to step 6" in write_report(tmp_path).read_text()


def test_tokens_and_time_of_a_long_run_are_known_at_some_steps_among_them_the_last(tmp_path):
    last = 5 * charts.MAX_REACHED - 1
    rows = [{"step": n, "loss": 1.0, "step_s": 0.5, "tokens": 8 * n} for n in range(1, last + 1)]
    write_rows(run_in(tmp_path) / "metrics.jsonl", rows)
    known = charts.reached(read_run(tmp_path))
    assert [known[name][0] for name in known] == [0, 0, 0] and len(known["step"]) <= charts.MAX_REACHED + 1
    assert [known[name][-1] for name in ("step", "tokens", "time")] == [last, 8 * last, last / 2]


def test_dead_experts_are_named_in_an_answer_and_beside_loads(tmp_path):
    rows = [{"step": 10 * n, "steps": 10, "load": [[2.0, 2.0, 0.0, 0.0]]} for n in (1, 2, 3)]
    write_rows(run_in(tmp_path) / "expert_load.jsonl", rows)
    said = "Warning: experts were dead or overfull in 20 steps, to the end. steps 21 to 30: 2 of 4 experts"
    assert said in told(learning(read_run(tmp_path)))
    assert outside_scripts(write_report(tmp_path)).count(said) == 2
    assert said not in told(learning(read_run(run_in(tmp_path / "a"))))


def test_each_heading_tile_and_chart_of_a_report_is_explained(tmp_path):
    each = {"matches": 2, "nodes_before": 9, "nodes_after": 5, "ms": 1.0}
    unit = {"unit": "attn..mlp", "used": 1, "graphs": 3, "seconds": 1.0, "source": "cache"}
    compiled = {"graphs": 3, "seconds": 1.0, "recompiled": 0, "passes": {"fuse": each}, "units": [unit]}
    heads = re.findall("<th.*?>(.*?)</th>", compile_section(run_with(tmp_path, compile_report=compiled)))
    marked = re.findall(r"<(?:h2|dt|figcaption)>(.*?)</", outside_scripts(write_report(tmp_path)))
    plain = [[each for each in found if 'class="term"' not in each] for found in (heads, marked)]
    asked = ["Does it learn?", "How fast is it, against the floor?", "Where does the time go?"]
    assert len(heads) == 10 and plain == [["ms", "used", "seconds", "from"], asked]


def test_a_comparison_names_what_differs(tmp_path):
    runs = [read_run(run_in(tmp_path / name / "run", lr)) for name, lr in (("a", "0.1"), ("b", "0.2"))]
    assert names_of(runs) == ["a/run", "b/run"]
    assert (differences := config_differences(runs)) == [["optim.lr", "0.1", "0.2"]]
    assert names_of([runs[0], runs[0]]) != [names_of(runs)[0]] * 2
    named = [["model.name", "a", "b"], ["model.top_k", "1", "2"], ["run.name", "a", "b"], *differences]
    assert column_keys(named) == ["model.name", "optim.lr"]  # a preset by its name
    assert column_keys(named, {"optim.lr", "train.steps"}) == ["optim.lr"]  # what was typed
    assert column_keys(named, {"model"}) == ["model.name"] and column_keys(named, {"a"})[1:] == ["optim.lr"]
    write_report(tmp_path / "b" / "run")
    runs[0].steps[:] = [row | {"rank_load": 1.5, "planned_rank_load": 1.0625} for row in runs[0].steps]
    write_comparison(runs, tmp_path / "both.html")
    head, first, second = re.findall("<tr>.*</tr>", outside_scripts(tmp_path / "both.html"))[:3]
    said = [re.sub("<.*?>", " ", row).split() for row in (first, second)]
    shown = re.sub("<.*?>", "", head)  # no MFU
    assert shown.startswith("runlosstokens/s eachs per steprank load") and shown.endswith("stateoptim.lr")
    assert said[0][:5] == ["a/run", "6.0000", "83", "2.5", "1.06"]
    assert [row[-1] for row in said] == ["0.1", "0.2"]
    assert "href" not in first and '<a href="b/run/report.html">b/run</a>' in second


def test_samples_of_code_are_in_a_monospace_font():
    assert quoted("def f():\n    return 1").startswith('<pre class="sample code">')
    assert quoted("Once upon a time,\n\nfrom far away.").startswith('<pre class="sample">')
    style = Path(web_page.__file__).with_name("page.css").read_text()
    assert re.search(r"\.sample\.code \{[^}]*monospace", style)


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
    ([], "nothing to report; name a run's folder"),
    (["run=a", "runs=a,b"], "two ways to name runs"),
    (["b"], "b"),
    (["run=nowhere"], "nowhere is not a folder"),
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


def test_a_page_that_cannot_be_made_is_a_warning_and_the_run_goes_on(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        leave_report(run_in(tmp_path / "a"))
        leave_report(tmp_path / "none")
    (record,) = caplog.records
    assert "is not a folder" in record.getMessage() and f"run={tmp_path}/none makes it" in record.getMessage()
    assert not record.exc_info
