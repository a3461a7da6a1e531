"""Pages in a real browser: a run's report, a comparison, a sweep and a pipeline."""

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from graphmoe.command.sweep import Job, JobStatus
from graphmoe.command.sweep.page import write_sweep_page
from graphmoe.pipeline_view.page import Panel
from graphmoe.pipeline_view.page import write_page as write_pipeline_page
from graphmoe.plan.pipeline.schedules import make_table
from graphmoe.plan.pipeline.simulate import Costs, simulate
from graphmoe.report import __main__ as report
from graphmoe.run.files import METRICS_FILE
from graphmoe.runtime.pipeline.recorder import FILE_NAME, write_timelines
from graphmoe.web_page import TERMS
from tests.runs import COMPILED, TINY, command

WIDTHS = (390, 1600)
CHARTS = {
    "Loss", "Learning rate", "Gradient norm", "Other losses", "Throughput of each process",
    "Model FLOPs utilisation", "Memory by kind", "Peak memory so far", "Load of experts", "Fullest expert",
    "Router entropy", "Time by segment", "Pipeline",
}  # fmt: skip
FOUND = """
(() => {
  const charts = [...document.querySelectorAll('figure.chart')].map(figure => {
    const plot = figure.querySelector('.plot');
    return {
      title: figure.querySelector('figcaption')?.textContent ?? 'Pipeline',
      alt: plot.getAttribute('aria-label'),
      traces: plot.calcdata.map(points => points.length),
      marks: plot.querySelectorAll(`.scatterlayer path.js-line, .scatterlayer .point, .barlayer .point path,
                                    .heatmaplayer image`).length,
      top: figure.getBoundingClientRect().top,
    };
  });
  const page = document.documentElement;
  return {charts, errors, asked: performance.getEntriesByType('resource').map(({name}) => name),
          fits: page.scrollWidth <= page.clientWidth, text: document.body.innerText,
          back: getComputedStyle(document.body).backgroundColor};
})()
"""
"""Script that finds each chart's points by trace, and the number of marks that stand for them."""
BEFORE = """<script>
  const errors = [];
  addEventListener('error', event => errors.push(event.message));
  console.error = console.assert = (...words) => errors.push(words.join(' '));
</script>"""
BEHIND = """<script>
  addEventListener('load', async () => {
    while (!document.documentElement.dataset.drawn) await new Promise(done => setTimeout(done, 50));
    parent.postMessage(JSON.stringify(%s), '*');
  });
</script>"""
FRAME = """<iframe src="page.html" style="width: %dpx; height: 900px; border: 0"></iframe>
<script>onmessage = ({data}) => { document.body.innerHTML = '<pre></pre>';
  document.querySelector('pre').textContent = data; };</script>"""
"""Page around another, since no window of Chromium is as narrow as a phone."""

pytestmark = pytest.mark.slow
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("no chromium: install Debian's to test the pages in it", allow_module_level=True)


def value_in(path, width, script, *, dark=False):
    """The value of a script in a page that Chromium has drawn in so many CSS pixels."""
    folder = Path(tempfile.mkdtemp(dir=path.parent))
    text = path.read_text().replace("<head>", f"<head>{BEFORE}", 1)
    (folder / "page.html").write_text(text.replace("</body>", f"{BEHIND % script}</body>"))
    (folder / "frame.html").write_text(FRAME % width)
    switches = ["headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-first-run"]
    switches += [f"user-data-dir={folder / 'profile'}", f"window-size={width + 20},920", "dump-dom"]
    switches += ["virtual-time-budget=60000", f"blink-settings=preferredColorScheme={0 if dark else 1}"]
    words = [CHROMIUM, *(f"--{switch}" for switch in switches), (folder / "frame.html").as_uri()]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=120).stdout
    (found,) = re.findall("<pre>(.*)</pre>", shown)
    return json.loads(html.unescape(found))


def drawn(path, width, *, dark=False):
    """What is found in a page that complains of nothing, loads nothing, and fits its window."""
    found = value_in(path, width, FOUND, dark=dark)
    assert (found["errors"], found["asked"], found["fits"]) == ([], [], True)
    for chart in found["charts"]:
        assert chart["alt"] and min(chart["traces"]) > 0, chart
        assert chart["marks"] >= len(chart["traces"]) > 0, chart
    return found


def timeline():
    return simulate(make_table("zb1p", 2, 4), Costs((2e3, 3e3), (2e3, 3e3), (1e3, 1.5e3)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    base = tmp_path_factory.mktemp("runs")
    words = ("log.report=true", "log.peak_tflops=0.5", "train.steps=8")
    full = (*COMPILED, "profile.steps=[5,6]", "graph.scope=layer", "train.val_batches=0")
    for name, more in {"full": full, "plain": ()}.items():
        started = command(base, *TINY, *words, *more, f"hydra.run.dir={name}", seconds=300)
        assert started.process.exitcode == 0, started.err.read_text()
        assert (base / name / "report.html").is_file()
    write_timelines(base / "full" / FILE_NAME, {4: timeline()})
    report.main([f"run={base / 'full'}"])
    return [base / "full", base / "plain"]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_chart_of_a_report_is_drawn_on_a_phone_and_a_wide_screen(runs, width, dark):
    found = drawn(runs[0] / "report.html", width, dark=dark)
    charts = found["charts"]
    assert {chart["title"] for chart in charts} == CHARTS
    assert (len({chart["top"] for chart in charts}) == len(charts)) == (width == 390)  # a grid where it fits
    for said in ("fuse_experts", "Compiled units", "graph.scope=layer", "torch", "MFU", "parallel layout"):
        assert said in found["text"], said
    assert (found["back"] == "rgb(18, 22, 28)") == dark


def test_the_slider_shows_earlier_loads(runs):
    script = """(() => {
      const input = document.querySelector('.slider input');
      const [output, plot] = ['output', '.plot'].map(name => input.closest('figure').querySelector(name));
      const state = () => [output.textContent, plot.data[0].z];
      const last = state();
      input.value = 0;
      input.dispatchEvent(new Event('input'));
      return [last, state()];
    })()"""
    recorded = [json.loads(line) for line in (runs[0] / "expert_load.jsonl").read_text().splitlines()]
    last, first = value_in(runs[0] / "report.html", 390, script)
    assert last == ["8", recorded[-1]["load"]]
    assert first == [str(recorded[0]["step"]), recorded[0]["load"]] and first[1] != last[1]


def test_the_report_of_a_run_that_recorded_little_says_what_would_draw_more(runs):
    found = drawn(runs[1] / "report.html", 390)
    traces = {chart["title"]: len(chart["traces"]) for chart in found["charts"]}
    assert CHARTS - {*traces} >= {"Time by segment", "Memory by kind", "Pipeline"} and traces["Loss"] == 2
    asked = "No time by segment: profile.steps records", "profile.steps=[6,8]", "use compile.enabled=true"
    assert [said for said in asked if said not in found["text"]] == []


@pytest.fixture(scope="module")
def both(runs):
    report.main([f"runs={runs[0]},{runs[1]}", f"out={runs[0].parent / 'both.html'}"])
    return runs[0].parent / "both.html"


@pytest.mark.parametrize("width", WIDTHS)
def test_a_comparison_lays_curves_over_each_other(both, width):
    found = drawn(both, width)
    of_charts = {chart["title"]: len(chart["traces"]) for chart in found["charts"]}
    assert of_charts.pop("Validation loss") == 1  # one run has no validation
    assert of_charts == dict.fromkeys(of_charts, 2) and len(of_charts) == 6
    assert "compile.enabled" in found["text"] and "peak GiB" in found["text"]
    assert "data.seq_len" not in found["text"]


LAYOUT = """(() => {
  const box = node => node.getBoundingClientRect(), all = query => [...document.querySelectorAll(query)];
  const rows = all('.grid').map(grid => Object.values(Object.groupBy(grid.children, node => box(node).top))
    .map(row => [row.length, Math.round(box(grid).right - box(row.at(-1)).right)]));
  const cut = all('.scroll').filter(node => node.scrollWidth > node.clientWidth);
  const marked = cut.filter(node => /gradient/.test(getComputedStyle(node).background));
  return {rows, cut: cut.length, marked: marked.length,
          heads: all('.sorted th').map(head => head.textContent)};
})()"""


def test_pages_are_whole_on_a_laptop_and_mark_what_a_phone_scrolls(runs, both):
    of_both, one = (value_in(page, 1440, LAYOUT) for page in (both, runs[0] / "report.html"))
    assert [count for count, _ in one["rows"][0]] == [2, 2]  # four charts of training
    assert {space for grid in of_both["rows"] + one["rows"] for _, space in grid} == {0}
    heads = of_both["heads"]
    assert of_both["cut"] == 0
    assert heads[0] == "run" and heads.index("state") < min(n for n, head in enumerate(heads) if "." in head)
    phone = value_in(both, 390, LAYOUT)
    assert phone["marked"] == phone["cut"] > 0


CONTROLS = """(async () => {
  const [form, plot] = ['.controls', '.chips ~ .grid .plot'].map(query => document.querySelector(query));
  const set = async (name, value) => {
    form.elements[name].value = value;
    form.dispatchEvent(new Event('change', {bubbles: true}));
    await new Promise(done => setTimeout(done, 300));
  };
  const state = () => ({
    x: plot.data.map(({x}) => x.at(-1)), traces: plot.data.length,
    last: plot.data.filter(({opacity}) => !opacity).map(({y}) => y.at(-1)),
    below: plot.layout.xaxis.title.text,
    ticks: [...plot.querySelectorAll('.ytick text')].map(tick => tick.textContent),
  });
  const found = {plain: state()};
  await set('x', 'tokens'); found.tokens = state();
  await set('x', 'time'); found.time = state();
  await set('smooth', '0.15'); found.smooth = state();
  await set('y', 'log'); found.log = state();
  document.querySelector('.chips button')?.click();
  await new Promise(done => setTimeout(done, 300));
  found.visible = plot.data.map(({visible}) => visible);
  const links = [...document.querySelectorAll('nav a')].map(link => link.getBoundingClientRect());
  found.links = links.every(({left, right}) => left >= 0 && right <= innerWidth);
  document.querySelector('.term').focus();
  const tip = document.getElementById('tip'), box = tip.getBoundingClientRect();
  found.tip = [tip.hidden, tip.textContent, box.left >= 0 && box.right <= innerWidth];
  [...document.querySelectorAll('.sorted th')].at(-1)?.click();
  found.order = [...document.querySelectorAll('.sorted tbody tr td:last-child')].map(c => c.textContent);
  return found;
})()"""


def sweep_in(folder):
    jobs = []
    for number, rate in enumerate(("1e-2", "1e-3")):
        losses = {n: (0.6 + 3 / n) / (1 + number) for n in range(1, 41)}
        rows = [{"step": n, "loss": loss, "step_s": 2.0, "tokens": 100 * n} for n, loss in losses.items()]
        (path := folder / str(number)).mkdir()
        (path / METRICS_FILE).write_text("\n".join(map(json.dumps, rows)))
        jobs.append(Job(number, [f"optim.lr={rate}"], path, JobStatus.finished, value=1.0 - number / 2))
    write_sweep_page(folder / "sweep.html", "command", jobs, {job.number: job.overrides for job in jobs})
    return folder / "sweep.html"


@pytest.mark.parametrize("width", WIDTHS)
def test_controls_change_axes_smooth_and_hide_runs_and_words_are_explained(width, tmp_path):
    found = value_in(sweep_in(tmp_path), width, f"await {CONTROLS}")
    plain, smooth = found["plain"], found["smooth"]
    assert (plain["x"], plain["traces"], plain["below"]) == ([40, 40], 2, "step")
    assert (found["tokens"]["x"], found["tokens"]["below"]) == ([4000, 4000], "tokens")
    assert (found["time"]["x"], found["time"]["below"]) == ([80, 80], "seconds in steps")
    assert smooth["traces"] == 4 and all(map(float.__gt__, smooth["last"], plain["last"]))  # a falling curve
    ticks = [float(tick) for tick in found["log"]["ticks"]]
    assert ticks == sorted(ticks) and 0.3 < ticks[0] < 1 < ticks[-1] < 4  # 0.9 is no 9
    assert found["visible"] == [False, False, True, True] and found["links"]
    assert found["tip"] == [False, TERMS["loss"], True]
    assert found["order"] == ["1e-3", "1e-2"]


@pytest.mark.parametrize("width", WIDTHS)
def test_pages_of_sweeps_and_pipelines_are_drawn(width, tmp_path):
    found = drawn(sweep_in(tmp_path), width, dark=True)
    traces = {chart["title"]: len(chart["traces"]) for chart in found["charts"]}
    assert traces == {"Value over optim.lr": 1, "Loss": 2}
    write_pipeline_page(tmp_path / "pipeline.html", "command", [Panel("one", timeline(), "")])
    assert len(drawn(tmp_path / "pipeline.html", width)["charts"]) == 1
