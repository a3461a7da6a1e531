"""The table and the page of a sweep: which jobs, which numbers, in which order, nothing from elsewhere."""

import json
import re
from pathlib import Path

import pytest

from graphmoe.command.sweep import Job, JobStatus, ranked, varying_overrides
from graphmoe.command.sweep.page import value_charts, write_sweep_page
from graphmoe.command.sweep.process import sweep_table
from graphmoe.report.charts import MAX_POINTS
from graphmoe.run.files import METRICS_FILE
from tests.runs import text_of

LONG = 0.012345678901234


def job(folder: Path, number: int, status: JobStatus, value: float | None = None, *words: str) -> Job:
    path = folder / str(number)
    path.mkdir()
    made = Job(number, ["train.steps=3", *words], path, status, value=value)
    if value is not None:
        numbers = {"final_val_loss": value, "final_loss": value + 1, "median_tokens_per_s": 12345.6}
        (path / "summary.json").write_text(json.dumps({"steps": 3, **numbers}))
        steps = [row(n, 9.0 - n, 0.5, 16) for n in (1, 2, 3)]
        rows = [{"step": 0, "val_loss": 9.0}, *steps, {"step": 3, "val_loss": value}]
        lines = [*map(json.dumps, rows), '{"step": 4, "lo']
        (path / METRICS_FILE).write_text("\n".join(lines))
    return made


def row(step: int, loss: float = 1.0, step_s: float = 1.0, rate: float = 1.0) -> dict[str, float]:
    return {"step": step, "loss": loss, "step_s": step_s, "tokens": 8 * step, "tokens_per_s": rate}


@pytest.fixture
def jobs(tmp_path):
    failed = job(tmp_path, 0, JobStatus.failed, None, "optim.lr=1", "data.seed=<b>")
    failed.error = "the configuration cannot run:\n  optim.lr=1 is <too> large"
    made = [
        failed,
        job(tmp_path, 1, JobStatus.finished, 4.5, "optim.lr=2"),
        job(tmp_path, 2, JobStatus.interrupted, 1.5, "optim.lr=3"),
        job(tmp_path, 3, JobStatus.finished, 4.25, f"optim.lr={LONG}"),
        Job(4, ["train.steps=3", "optim.lr=5"]),
        job(tmp_path, 5, JobStatus.finished, None, "optim.lr=6"),
    ]
    return ranked(made), varying_overrides(made)


def test_the_table_has_a_column_for_each_key_that_differs_and_no_others(jobs):
    lines = [line.split() for line in text_of(sweep_table(*jobs), width=100).splitlines() if line.strip()]
    assert lines[0] == ["job", "lr", "seed", "val", "loss", "loss", "tokens/s", "steps", "state"]
    assert lines[2] == ["3", "0.012346", "4.2500", "5.2500", "12,346", "3", "finished"]
    assert ["4", "5", "not", "started"] in lines and ["0", "1", "<b>", "failed"] in lines


def test_curves_of_jobs_have_their_words_and_what_each_step_had_reached(jobs, tmp_path):
    write_sweep_page(tmp_path / "sweep.html", "command", *jobs)
    text = (tmp_path / "sweep.html").read_text()
    (known,) = re.findall(r'id="reached">(.*?)</script>', text)
    specs = map(json.loads, re.findall(r'<script type="application/json">(.*?)</script>', text))
    loss, validation, speed = (spec["data"] for spec in specs if spec["curves"])
    names = ["3 optim.lr=0.012346", "1 optim.lr=2", "2 optim.lr=3"]
    assert [trace["name"] for trace in loss] == [trace["meta"]["run"] for trace in loss] == names
    assert loss[0]["meta"]["words"] == f"job 3<br>optim.lr={LONG}"
    assert (loss[0]["y"], validation[0]["y"], speed[0]["y"]) == ([8.0, 7.0, 6.0], [9.0, 4.25], [16] * 2)
    reached = {"step": [0, 1, 2, 3], "tokens": [0, 8, 16, 24], "time": [0.0, 0.5, 1.0, 1.5]}
    assert json.loads(known) == dict.fromkeys(names, reached)
    assert len({trace["line"]["color"] for trace in loss}) == 3


def test_the_value_is_drawn_over_each_parameter_with_a_line_for_each_value_of_one_other():
    values = {0: 3.0, 1: 2.0, 2: 4.0, 3: 5.0, 4: None}
    words = [("1e-3", "a"), ("1e-2", "a"), ("1e-3", "b"), ("1e-2", "b"), ("1e-1", "b")]
    settings = {n: {"optim.lr": lr, "model": model} for n, (lr, model) in enumerate(words)}
    over_lr, over_model = value_charts(values, settings)
    assert [(t["name"], t["x"], t["y"]) for t in over_lr.traces] == [
        ("model=a", [0.001, 0.01], [3.0, 2.0]),
        ("model=b", [0.001, 0.01], [4.0, 5.0]),
    ]
    axis = over_lr.layout["xaxis"]
    assert (axis["type"], axis["ticktext"]) == ("log", ["1e-3", "1e-2"]) and "2 at 1e-2" in over_lr.alt
    assert over_model.layout["xaxis"]["type"] == "category" and over_model.traces[0]["mode"] == "markers"
    assert value_charts({0: 1.0, 1: None}, settings) == []
    more = {n: {**own, "seed": str(n)} for n, own in settings.items()}
    assert [len(chart.traces) for chart in value_charts(values, more)] == [1, 1, 1]


def test_a_page_may_have_no_curve_and_says_where_a_long_one_is_thinned(tmp_path):
    made = job(tmp_path, 0, JobStatus.running)
    write_sweep_page(tmp_path / "sweep.html", "command", [made], {0: []})
    assert 'id="plotly"' not in (tmp_path / "sweep.html").read_text()  # there is no curve yet
    rows = "".join(f"{json.dumps(row(step))}\n" for step in range(1, 3 * MAX_POINTS))
    (tmp_path / "0" / METRICS_FILE).write_text(rows)
    write_sweep_page(tmp_path / "sweep.html", "command", [made], {0: []})
    assert "Of more than 1,500 points of a curve the smallest" in (tmp_path / "sweep.html").read_text()


def test_the_page_loads_nothing_and_escapes_what_users_wrote(jobs, tmp_path):
    page = tmp_path / "sweep.html"
    write_sweep_page(page, "python -m graphmoe.train -m data.seed=<b>", *jobs)
    text = page.read_text()
    outside = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "data.seed=&lt;b&gt;" in outside and "optim.lr=1 is &lt;too&gt; large" in outside
    assert "<b>" not in outside and not re.search(r"(src|href)=(?!\"#)", outside)
    assert not re.search(r"<script[^>]* src=", text) and "Plotly.react" in text
    assert outside.count("<tr>") == 7
    (tmp_path / "3" / "report.html").touch()
    write_sweep_page(page, "command", *jobs)
    assert re.findall(r'<a href="(?!#)(.*?)">(.*?)<', page.read_text()) == [("3/report.html", "3")]
