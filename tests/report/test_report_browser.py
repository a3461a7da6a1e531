"""Pages in a real browser: a run's report, a comparison, a sweep and a pipeline."""

import json
from pathlib import Path

import pytest

from graphmoe.command.sweep.folder import Job, JobStatus
from graphmoe.command.sweep.process import write_page as write_sweep_page
from graphmoe.pipeline_view.bars import Panel
from graphmoe.pipeline_view.page import write_page as write_pipeline_page
from graphmoe.plan.pipeline.schedules import make_table
from graphmoe.plan.pipeline.simulate import Costs, simulate
from graphmoe.report import __main__ as report
from graphmoe.run.files import METRICS_FILE
from graphmoe.runtime.pipeline.recorder import FILE_NAME, write_timelines
from tests.report.browser import find_chromium, page_in_chromium
from tests.runs import COMPILED, TINY, command

WIDTHS = (390, 1600)
CHARTS = {
    "Loss", "Learning rate", "Gradient norm", "Other losses", "Throughput of each process",
    "Model FLOPs utilisation", "Memory by kind", "Peak memory so far", "Load of experts", "Fullest expert",
    "Router entropy", "Time by segment", "Pipeline",
}  # fmt: skip
DRAWN = """
[...document.querySelectorAll('figure.chart')].map(figure => {
  const plot = figure.querySelector('.plot');
  return {
    title: figure.querySelector('figcaption')?.textContent ?? 'Pipeline',
    alt: plot.getAttribute('aria-label'),
    traces: plot.calcdata.map(points => points.length),
    marks: plot.querySelectorAll(
      '.scatterlayer path.js-line, .scatterlayer .point, .barlayer .point path, .heatmaplayer image').length,
    top: figure.getBoundingClientRect().top,
  };
})
"""
"""Script that lists each chart's points by trace, and counts the marks that stand for them in the page."""

pytestmark = pytest.mark.slow
if (CHROMIUM := find_chromium()) is None:
    pytest.skip("no chromium: install Debian's to test the pages in it", allow_module_level=True)


def timeline():
    return simulate(make_table("zb1p", 2, 4), Costs((2e3, 3e3), (2e3, 3e3), (1e3, 1.5e3)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """A compiled run with all that a run can leave, and a plain one."""
    base = tmp_path_factory.mktemp("runs")
    words = ("log.report=true", "log.peak_tflops=0.5", "train.steps=8")
    full = ("profile.steps=[5,6]", "graph.scope=layer", "train.val_batches=0", "hydra.run.dir=full")
    for started in (
        command(base, *TINY, *COMPILED, *words, *full, seconds=300),
        command(base, *TINY, *words, "hydra.run.dir=plain"),
    ):
        assert started.process.exitcode == 0, started.err.read_text()
    assert (base / "full" / "report.html").is_file() and (base / "plain" / "report.html").is_file()
    write_timelines(base / "full" / FILE_NAME, {4: timeline()})
    report.main([f"run={base / 'full'}"])
    return [base / "full", base / "plain"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    assert CHROMIUM is not None
    with page_in_chromium(CHROMIUM, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def drawn(page, path: Path, width: int, *, dark: bool = False) -> list[dict]:
    """The charts of a page that complains of nothing, asks the network for nothing, and fits its window."""
    page.open(path, width, dark=dark)
    charts = page.value(DRAWN)
    assert page.errors == [] and page.requests == [path.resolve().as_uri()]
    assert page.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    for chart in charts:
        assert chart["alt"] and min(chart["traces"]) > 0, chart
        assert chart["marks"] >= len(chart["traces"]) > 0, chart
    return charts


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_chart_of_a_report_is_drawn_on_a_phone_and_a_wide_screen(runs, page, width, dark):
    charts = drawn(page, runs[0] / "report.html", width, dark=dark)
    assert {chart["title"] for chart in charts} == CHARTS
    assert (len({chart["top"] for chart in charts}) == len(charts)) == (width == 390)  # a grid where it fits
    text = page.value("document.body.innerText")
    for said in ("fuse_experts", "Compiled units", "graph.scope=layer", "torch", "MFU", "parallel layout"):
        assert said in text, said
    back = page.value("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(18, 22, 28)") == dark


def test_the_slider_shows_earlier_loads(runs, page):
    page.open(runs[0] / "report.html", 390)
    state = """(() => { const figure = document.querySelector('.slider').closest('figure');
      return [figure.querySelector('output').textContent, figure.querySelector('.plot').data[0].z]; })()"""
    last, loads = page.value(state)
    page.value("""(() => { const input = document.querySelector('.slider input'); input.value = 0;
      input.dispatchEvent(new Event('input')); })()""")
    first, earlier = page.value(state)
    recorded = [json.loads(line) for line in (runs[0] / "expert_load.jsonl").read_text().splitlines()]
    assert (first, last) == (str(recorded[0]["step"]), "8")
    assert (earlier, loads) == (recorded[0]["load"], recorded[-1]["load"]) and earlier != loads


def test_the_report_of_a_run_that_recorded_little_says_what_would_draw_more(runs, page):
    charts = drawn(page, runs[1] / "report.html", 390)
    assert CHARTS - {chart["title"] for chart in charts} >= {"Time by segment", "Memory by kind", "Pipeline"}
    assert [len(chart["traces"]) for chart in charts if chart["title"] == "Loss"] == [2]
    text = page.value("document.body.innerText")
    assert "profile.steps=[10,12]" in text and "use compile.enabled=true" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_a_comparison_lays_curves_over_each_other(runs, page, width, tmp_path):
    report.main([f"runs={runs[0]},{runs[1]}", f"out={tmp_path / 'both.html'}"])
    (chart,) = drawn(page, tmp_path / "both.html", width)
    assert len(chart["traces"]) == 2 * 7 - 1  # one run has no validation
    text = page.value("document.body.innerText")
    assert "compile.enabled" in text and "data.seq_len" not in text and "final loss" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_pages_of_sweeps_and_pipelines_are_drawn(page, width, tmp_path):
    rows = [{"step": n, "loss": 9.0 - n, "step_s": 1.0, "tokens": n, "tokens_per_s": 1.0} for n in range(5)]
    lines = [json.dumps(row) for row in [*rows, {"step": 5, "val_loss": 3.0}]]
    (tmp_path / METRICS_FILE).write_text("\n".join(lines))
    job = Job(0, ["optim.lr=1"], tmp_path, JobStatus.finished, value=3.0)
    write_sweep_page(tmp_path / "sweep.html", "command", [job], {0: ["optim.lr=1"]})
    assert [len(chart["traces"]) for chart in drawn(page, tmp_path / "sweep.html", width)] == [3]
    write_pipeline_page(tmp_path / "pipeline.html", "command", [Panel("one", timeline(), "")])
    assert len(drawn(page, tmp_path / "pipeline.html", width)) == 1
