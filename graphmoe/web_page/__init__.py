"""Pages of charts and tables, each one file that needs no network, for phones and wide screens."""

import base64
import functools
import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from graphmoe.runtime.host.files import replace_text

COLOURS = ("#4c8dd6", "#e8843c", "#3fa66b", "#c75d92", "#9a7bd1", "#b59a2f", "#4fb3c9", "#d65f5f")


@dataclass(frozen=True)
class Frames:
    names: Sequence[str]
    values: Sequence[Sequence[Sequence[float]]]


class Link(NamedTuple):
    text: str
    to: str


@dataclass(frozen=True)
class Chart:
    """A Plotly figure as plain values; the page's script draws it."""

    title: str
    alt: str
    """Text for readers who cannot see the chart."""
    traces: Sequence[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    height_px: int = 300
    is_wide: bool = False
    """True if the chart takes the whole width of a wide screen."""
    frames: Frames | None = None
    note: str = ""
    is_curves: bool = False
    """True if the traces are over steps, so that the page's controls change axes and smoothing."""
    is_timeline: bool = False
    """True for a timeline: own titles, zoom by wheel or buttons, scrolling below 640 pixels of width."""

    def to_html(self) -> str:
        """Return the chart's element in a page; the page's script draws it."""
        slider = ""
        if self.frames is not None:
            last = len(self.frames.values) - 1
            slider = (
                f'<label class="slider">up to step <output>{_text(self.frames.names[last])}'
                f'</output><input type="range" min="0" max="{last}" value="{last}"></label>'
            )
        title = "" if self.is_timeline else f"<figcaption>{_term(self.title)}</figcaption>"
        note = f'<p class="note">{_text(self.note)}</p>' if self.note else ""
        frames = {"names": self.frames.names, "values": self.frames.values} if self.frames else None
        kinds = {"curves": self.is_curves, "zooms": self.is_timeline}
        spec = _json({"data": self.traces, "layout": self.layout, "frames": frames, **kinds})
        return (
            f'<figure class="chart{" wide" if self.is_wide else ""}">{title}'
            f'<div class="scroll"><div class="plot" role="img" aria-label="{_text(self.alt)}" '
            f'style="height:{self.height_px}px;min-width:{640 * self.is_timeline}px"></div></div>'
            f'{slider}{note}<script type="application/json">{spec}</script></figure>'
        )


def grid(charts: Iterable[Chart]) -> str:
    """Return HTML of charts, next to each other if the page is wide enough."""
    return f'<div class="grid">{"".join(chart.to_html() for chart in charts)}</div>'


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    numbers_from: int | None = None,
    numbers_to: int | None = None,
    caption: str = "",
    is_sorted: bool = False,
) -> str:
    """Return an HTML table that scrolls; columns from ``numbers_from`` to ``numbers_to`` are numbers."""

    def row(tag: str, cells: Sequence[Any]) -> str:
        first = len(cells) if numbers_from is None else numbers_from
        numbers = range(first, len(cells) if numbers_to is None else numbers_to)
        kinds = [' class="number"' if place in numbers else "" for place in range(len(cells))]
        show = _head if tag == "th" else _cell
        return "".join(f"<{tag}{kind}>{show(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))

    title = f"<caption>{_text(caption)}</caption>" if caption else ""
    thead = f"<thead><tr>{row('th', head)}</tr></thead>" if head else ""
    body = "\n".join(f"<tr>{row('td', cells)}</tr>" for cells in rows)
    kind = ' class="sorted"' if is_sorted else ""
    return (
        f'<div class="scroll" tabindex="0"><table{kind}>{title}{thead}<tbody>\n{body}</tbody></table></div>'
    )


def tiles(entries: Iterable[tuple[str, str, str]]) -> str:
    """Return HTML boxes, each with a name, a value and a remark."""
    boxes = [
        f"<div><dt>{_term(name)}</dt><dd>{_text(value)}</dd><dd class=remark>{_text(remark)}</dd></div>"
        for name, value, remark in entries
    ]
    return f'<dl class="tiles">{"".join(boxes)}</dl>'


def cards(entries: Iterable[tuple[str, str, Iterable[str]]]) -> str:
    """Return HTML cards of a question, a short answer and sentences; words between backquotes are code."""
    boxes = [
        f"<article><h2>{_text(question)}</h2><p class=answer>{_text(answer)}</p>"
        f"{''.join(map(paragraph, sentences))}</article>"
        for question, answer, sentences in entries
    ]
    return f'<div class="cards">{"".join(boxes)}</div>'


def chips(colours: Mapping[str, str]) -> str:
    """Return HTML buttons of a page's runs, in their colours; a click hides a run in all charts."""
    buttons = (
        f'<button type="button" aria-pressed="true" data-run="{_text(name)}" style="--run:{colour}">'
        f"{_text(name)}</button>"
        for name, colour in colours.items()
    )
    return f'<div class="chips">{"".join(buttons)}</div>'


def controls(reached: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return choices of axes and smoothing of curves; ``reached``: tokens and seconds of each run by step."""
    choices = "".join(
        f'<label title="{_text(says)}">{name} <select name="{key}">'
        + "".join(f'<option value="{value}">{text}</option>' for value, text in options.items())
        + "</select></label>"
        for key, name, says, options in _CHOICES
    )
    data = f'<script type="application/json" id="reached">{_json(reached)}</script>'
    return f'<form class="controls" aria-label="curves" autocomplete="off">{choices}</form>{data}'


_CHOICES = (
    ("x", "over", "horizontal axis of all curves", {"step": "steps", "tokens": "tokens", "time": "time"}),
    (
        "smooth",
        "smoothed",
        "a mean over the last steps, older ones counting less: over 1, 4 or 15 of 100 steps of the run",
        {"0": "no", "0.01": "a little", "0.04": "more", "0.15": "much"},
    ),
    (
        "y",
        "axis",
        "vertical axis of all curves; auto is logarithmic where that is usual",
        {"auto": "auto", "linear": "linear", "log": "log"},
    ),
)


def paragraph(text: str) -> str:
    """Return an HTML paragraph; words between backquotes are code."""
    parts = [_text(part) for part in text.split("`")]
    return "<p>" + "".join(f"<code>{p}</code>" if n % 2 else p for n, p in enumerate(parts)) + "</p>"


def quoted(text: str) -> str:
    """Return a text as HTML with its line breaks; indented text or code is set as code."""
    kind = (
        " code" if re.search(r"^(?:  |\t|def |class |import |from \w+ import |#include)", text, re.M) else ""
    )
    return f'<pre class="sample{kind}">{_text(text)}</pre>'


def folds(parts: Iterable[tuple[str, str]]) -> str:
    folded = (f"<details><summary>{_text(name)}</summary>{content}</details>" for name, content in parts)
    return f'<div class="folds">{"".join(folded)}</div>'


def side_by_side(parts: Iterable[str]) -> str:
    return f'<div class="side">{"".join(parts)}</div>'


def write_page(
    path: Path, title: str, header: str, sections: Sequence[tuple[str, str]], bar: str = ""
) -> None:
    """Write sections, each a heading and HTML, atomically; ``bar`` stays in sight beside their links."""
    body = [header]
    named = [(name, name.lower().replace(" ", "-"), content) for name, content in sections]
    links = "".join(f'<a href="#{anchor}">{_text(name)}</a>' for name, anchor, _ in named if name)
    if links or bar:
        body.append(f'<div class="bar">{f"<nav>{links}</nav>" if links else ""}{bar}</div>')
    for name, anchor, content in named:
        head = f"<h2>{_term(name)}</h2>" if name else ""
        body.append(f'<section id="{anchor}">{head}{content}</section>' if name else content)
    whole = "\n".join(body)
    style, code = (
        Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
    )
    drawing = (
        f'<script type="text/plain" id="plotly">{_plotly()}</script>\n' if 'class="plot"' in whole else ""
    )
    script = f"{drawing}<script>{code}</script>"
    replace_text(path, _PAGE.format(title=_text(title), style=style, body=whole, script=script))


@functools.cache
def _plotly() -> str:
    return base64.b64encode(Path(__file__).with_name("plotly-cartesian.min.js.gz").read_bytes()).decode()


def _json(value: Any) -> str:
    return json.dumps(_finite(value), separators=(",", ":")).replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _cell(value: Any) -> str:
    if isinstance(value, Link):
        return f'<a href="{_text(quote(value.to))}">{_text(value.text)}</a>'
    return _text(value)


def _head(text: str) -> str:
    return _term(text) if text.lower() in TERMS else re.sub("([._])", r"\1<wbr>", _text(text))


def _term(text: str) -> str:
    says = TERMS.get(text.lower())
    if says is None:
        return _text(text)
    return f'<span class="term" tabindex="0" data-says="{_text(says)}">{_text(text)}</span>'


def _text(value: Any) -> str:
    return html.escape(str(value))


_TERMS = """\
training: Curves of what the model learns, over the steps of the run.
speed: How many tokens a second the run trains on, and how near that is to what the devices can do.
memory: What the run holds in the memory of a device: projected by kind, and measured.
experts: How evenly the router spreads tokens over the experts of each layer.
segments: A layer is a list of named parts; this is the time of each in a step, from a recorded trace.
pipeline: Layers shared out over ranks in stages: which rank did what when.
compilation: What was compiled, what was rewritten on the way, and what came from the cache.
capture: Parts of a step recorded as graphs, which the device replays without waiting for the host.
model: The preset that the run trains, with its number format and state.
device: What each rank runs on.
parallel layout: How ranks share the work: dp copies of the model, tp parts of each matrix, cp parts of a
    sequence, pp stages of layers, ep experts.
tokens/s/gpu | throughput | throughput of each gpu: Tokens trained on in a second, over the number of GPUs.
tokens/s/process | throughput of each process: Tokens trained on in a second, over the number of processes.
tokens/s each: Tokens trained on in a second, over the number of devices: the median step but the first.
mfu | model flops utilisation: Model FLOPs utilisation: FLOPs that the model's arithmetic needs, over what
    the device could do in the same time at its peak. Recomputed work does not count.
final loss: Cross-entropy in nats of a token of the last step's batch. Lower is better; e to its power is
    how many tokens the model hesitates between.
loss: Cross-entropy in nats of a token of the batch trained on. Lower is better.
validation loss: The same loss on text that the run does not train on.
peak memory: The most that was held on any rank at once.
first step | first step s: Seconds from the command to the end of the first step: start, data, compilation.
configuration: Every key of the run with its value, as on a command line.
environment: Versions, machine and commit that the run was started with.
sample: Text that the model wrote when the run had ended.
model flops of each gpu: FLOPs a second that the model's arithmetic needs, over the number of GPUs.
model flops of each process: FLOPs a second that the model's arithmetic needs, by process.
learning rate: How far a step moves the weights: warm-up, then the schedule of optim.schedule.
gradient norm: Length of the gradient before it is clipped to train.clip_grad_norm. Peaks are batches that
    pull hard; a rise over many steps is a warning.
other losses: Terms added to the loss with a weight: for even experts, small router scores, further tokens.
loss of load balance: A term that is 1 if all experts get equally many tokens, and larger if not.
loss of router z: A term that keeps the router's scores small.
loss of multi-token prediction: The loss of the layers that predict tokens after the next.
memory by kind: Projected bytes of weights, gradients, optimizer state and activations; in a run's report
    beside the measured peak.
peak memory so far: The most that rank 0 has held at once up to a step.
load of experts: Tokens that an expert gets over the mean of its layer: 1 is balanced, 0 is an expert that
    nothing reaches and that learns nothing.
fullest expert: Load of the fullest expert of a layer; 1 is balance. Where ranks share experts, the fullest
    rank is the one that the others wait for.
router entropy: Uncertainty of the router: ln(experts) if it scores all experts alike, 0 if it is certain.
time by segment: Time of a step by part of a layer and by direction.
s per step: Seconds of a step, the median but the first, which compiles.
peak gib: The most memory that was held at once, in GiB of 2^30 bytes.
val loss: Final loss on text that the run does not train on; empty if the last step was not validated.
state: How the run ended, as far as its folder says.
pass: A rewrite of the traced graph, before it is compiled.
matches: Places in the graphs that the pass rewrote.
operations: Operations of those graphs before and after.
kept for backward: Results of the forward that are held until the backward needs them.
unit: Neighbouring segments that are compiled as one.
graphs: Graphs made of it: forward, gradients of inputs, gradients of weights.
captured: Units that replay from graphs.
places: Layers and micro-batches that it was captured for.
nodes: Kernels and copies in its graphs.
"""
_ROWS = [row.split(": ", 1) for row in re.sub(r"\n +", " ", _TERMS).splitlines()]
TERMS = {name: says for names, says in _ROWS for name in names.split(" | ")}
"""Terms of the pages, a sentence each, shown when the mouse is on them; docs/glossary.md has more."""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1></header>
<main>
{body}
</main>
{script}
</body>
</html>
"""
