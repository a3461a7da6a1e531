"""Pages of charts and tables, each one file that needs no network, for phones and wide screens."""

import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphmoe.runtime.host.files import replace_text

COLOURS = ("#4c8dd6", "#e8843c", "#3fa66b", "#c75d92", "#9a7bd1", "#b59a2f", "#4fb3c9", "#d65f5f")
"""Colours of curves, seen on white and on black."""


@dataclass(frozen=True)
class Frames:
    """The values of a heat map, one picture after the other, chosen by a slider."""

    label: str
    names: Sequence[str]
    values: Sequence[Sequence[Sequence[float]]]


@dataclass(frozen=True)
class Chart:
    """A figure of Plotly, as plain values."""

    title: str
    alt: str
    """The chart in words, for readers who cannot see it."""
    traces: Sequence[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    height_px: int = 300
    is_wide: bool = False
    """Takes the whole width of a wide screen."""
    min_width_px: int = 0
    """Narrower screens scroll the chart in its box."""
    frames: Frames | None = None
    note: str = ""
    has_own_title: bool = False
    """The figure has titles of its own."""
    is_zoomed: bool = False
    """A wheel zooms, and on a touch screen there are buttons that do."""

    def to_html(self) -> str:
        """The chart's place in a page; the page's script draws it."""
        slider = ""
        if self.frames is not None:
            last = len(self.frames.values) - 1
            slider = (
                f'<label class="slider">{_text(self.frames.label)} <output>{_text(self.frames.names[last])}'
                f'</output><input type="range" min="0" max="{last}" value="{last}"></label>'
            )
        title = "" if self.has_own_title else f"<figcaption>{_text(self.title)}</figcaption>"
        note = f'<p class="note">{_text(self.note)}</p>' if self.note else ""
        frames = {"names": self.frames.names, "values": self.frames.values} if self.frames else None
        spec = _json({"data": self.traces, "layout": self.layout, "frames": frames, "zooms": self.is_zoomed})
        return (
            f'<figure class="chart{" wide" if self.is_wide else ""}">{title}'
            f'<div class="scroll"><div class="plot" role="img" aria-label="{_text(self.alt)}" '
            f'style="height:{self.height_px}px;min-width:{self.min_width_px}px"></div></div>{slider}{note}'
            f'<script type="application/json">{spec}</script></figure>'
        )


def chart_of(figure: Any, title: str, alt: str, **words: Any) -> Chart:
    """A chart of a ``plotly.graph_objects.Figure`` that has its own height and titles."""
    plain = json.loads(figure.to_json())
    layout = {key: value for key, value in plain["layout"].items() if key not in ("template", "height")}
    return Chart(
        title,
        alt,
        plain["data"],
        layout,
        height_px=math.ceil(figure.layout.height),
        is_wide=True,
        has_own_title=True,
        **words,
    )


def grid(charts: Iterable[Chart]) -> str:
    """Charts next to each other where there is room."""
    return f'<div class="grid">{"".join(chart.to_html() for chart in charts)}</div>'


def table(
    head: Sequence[str], rows: Iterable[Sequence[Any]], *, numbers_from: int | None = None, caption: str = ""
) -> str:
    """A table that scrolls in its own box; columns from ``numbers_from`` on are numbers."""

    def row(tag: str, cells: Sequence[Any]) -> str:
        first = len(cells) if numbers_from is None else numbers_from
        kinds = ["" if place < first else ' class="number"' for place in range(len(cells))]
        return "".join(f"<{tag}{kind}>{_text(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))

    title = f"<caption>{_text(caption)}</caption>" if caption else ""
    thead = f"<thead><tr>{row('th', head)}</tr></thead>" if head else ""
    body = "\n".join(f"<tr>{row('td', cells)}</tr>" for cells in rows)
    return f'<div class="scroll" tabindex="0"><table>{title}{thead}<tbody>\n{body}</tbody></table></div>'


def tiles(entries: Iterable[tuple[str, str, str]]) -> str:
    """Name, value and remark of each, as boxes."""
    boxes = [
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd><dd class=remark>{_text(remark)}</dd></div>"
        for name, value, remark in entries
    ]
    return f'<dl class="tiles">{"".join(boxes)}</dl>'


def paragraph(text: str) -> str:
    """A paragraph; words between backquotes are code."""
    parts = [_text(part) for part in text.split("`")]
    return "<p>" + "".join(f"<code>{p}</code>" if n % 2 else p for n, p in enumerate(parts)) + "</p>"


def folds(parts: Iterable[tuple[str, str]]) -> str:
    """Headings that open with a click, and their contents."""
    folded = (f"<details><summary>{_text(name)}</summary>{content}</details>" for name, content in parts)
    return f'<div class="folds">{"".join(folded)}</div>'


def side_by_side(parts: Iterable[str]) -> str:
    """Parts next to each other where there is room."""
    return f'<div class="side">{"".join(parts)}</div>'


def write_page(path: Path, title: str, header: str, sections: Sequence[tuple[str, str]]) -> None:
    """Write a page of sections, each a heading and HTML, whole at any moment.

    *Raises* ImportError where Plotly is missing and a section has a chart.
    """
    body = [header]
    named = [(name, name.lower().replace(" ", "-"), content) for name, content in sections]
    if any(name for name, _, _ in named):
        links = "".join(f'<a href="#{anchor}">{_text(name)}</a>' for name, anchor, _ in named if name)
        body.append(f"<nav>{links}</nav>")
    for name, anchor, content in named:
        head = f"<h2>{_text(name)}</h2>" if name else ""
        body.append(f'<section id="{anchor}">{head}{content}</section>' if name else content)
    whole = "\n".join(body)
    style, code = (
        Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
    )
    script = ""
    if 'class="plot"' in whole:
        from plotly.offline import get_plotlyjs

        script = f"<script>{get_plotlyjs()}</script>\n<script>{code}</script>"
    replace_text(path, _PAGE.format(title=_text(title), style=style, body=whole, script=script))


def _json(value: Any) -> str:
    """JSON that may stand in a script element; numbers that are not finite are null."""
    return json.dumps(_finite(value), separators=(",", ":")).replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _text(value: Any) -> str:
    return html.escape(str(value))


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
