"""The table and the page of a sweep: which jobs, which numbers, in which order, nothing from elsewhere."""

import json
import re
from pathlib import Path

import pytest

from graphmoe.command.sweep.folder import Job, JobStatus, ranked, varying_overrides
from graphmoe.command.sweep.process import job_curves, sweep_table, write_page
from graphmoe.report.charts import MAX_POINTS
from graphmoe.report.comparison import curves_figure
from graphmoe.run.files import METRICS_FILE
from tests.runs import text_of

LONG = 0.012345678901234


def job(folder: Path, number: int, status: JobStatus, value: float | None = None, *words: str) -> Job:
    """A job with a folder, and with a summary if it has a value."""
    path = folder / str(number)
    path.mkdir()
    made = Job(number, ["train.steps=3", *words], path, status, value=value)
    if value is not None:
        numbers = {"final_val_loss": value, "final_loss": value + 1, "median_tokens_per_s": 12345.6}
        (path / "summary.json").write_text(json.dumps({"steps": 3, **numbers}))
        rows = [{"step": 0, "val_loss": 9.0}]
        rows += [
            {"step": n, "loss": 9.0 - n, "step_s": 0.5, "tokens": 8 * n, "tokens_per_s": 16}
            for n in (1, 2, 3)
        ]
        rows.append({"step": 3, "val_loss": value})
        lines = [*(json.dumps(row) for row in rows), '{"step": 4, "lo']
        (path / METRICS_FILE).write_text("\n".join(lines))
    return made


@pytest.fixture
def jobs(tmp_path):
    """One of each kind."""
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


def test_curves_are_over_steps_tokens_and_time_by_a_button(jobs):
    ordered, words = jobs
    curves = [each for job in ordered if (each := job_curves(job, words[job.number])) is not None]
    figure = curves_figure(curves)
    names = [trace.name for trace in figure.data[::3]]
    assert names == ["3 optim.lr=0.012346", "1 optim.lr=2", "2 optim.lr=3"]
    loss, validation, speed = figure.data[:3]
    assert list(loss.y) == [8.0, 7.0, 6.0] and list(validation.y) == [9.0, 4.25] and list(speed.y) == [16] * 2
    over = {button.label: button.args[0]["x"] for button in figure.layout.updatemenus[0].buttons}
    assert over["step"][:2] == [[1, 2, 3], [0, 3]] and over["tokens"][:2] == [[8, 16, 24], [0, 24]]
    assert over["time in steps, s"][:2] == [[0.5, 1.0, 1.5], [0.0, 1.5]]
    assert len(over["step"]) == len(figure.data) == 9
    assert f"job 3<br>optim.lr={LONG}<br>" in loss.hovertemplate


def test_a_long_curve_is_thinned_and_the_page_says_so(tmp_path):
    made = job(tmp_path, 0, JobStatus.running)
    steps = range(1, 3 * MAX_POINTS)
    rows = [{"step": n, "loss": 1.0, "step_s": 1.0, "tokens": 8 * n, "tokens_per_s": 1.0} for n in steps]
    (tmp_path / "0" / METRICS_FILE).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write_page(tmp_path / "sweep.html", "command", [made], {0: []})
    assert "Of more than 1,500 points the smallest" in (tmp_path / "sweep.html").read_text()


def test_the_page_loads_nothing_and_escapes_what_users_wrote(jobs, tmp_path):
    page = tmp_path / "sweep.html"
    write_page(page, "python -m graphmoe.train -m data.seed=<b>", *jobs)
    text = page.read_text()
    outside = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "data.seed=&lt;b&gt;" in outside and "optim.lr=1 is &lt;too&gt; large" in outside
    assert "<b>" not in outside and not re.search(r"(src|href)=", outside)
    assert not re.search(r"<script[^>]* src=", text) and "Plotly.react" in text
    assert outside.count("<tr>") == 7


def test_a_sweep_without_a_curve_has_a_page_too(tmp_path):
    failed = job(tmp_path, 0, JobStatus.failed)
    write_page(tmp_path / "sweep.html", "command", [failed], {0: []})
    assert "Plotly" not in (tmp_path / "sweep.html").read_text()
