"""Pictures of a pipeline's timelines: every action has its bar, in its place and with its words."""

import dataclasses
import json
import re

import pytest
from matplotlib.image import imread

from graphmoe.config.schema import ConfigError
from graphmoe.pipeline_view.bars import (
    COLOURS,
    Panel,
    bars_of,
    draw_chart,
    idle_shares,
    summary,
    text_colour,
)
from graphmoe.pipeline_view.page import timeline_figure, write_page
from graphmoe.plan.pipeline.actions import Action
from graphmoe.plan.pipeline.simulate import Span
from tests.pipeline_timelines import folded_in_turns, long_timeline, two_ranks

PANELS = [Panel("<mixed>", two_ranks(), ""), Panel("folded", folded_in_turns(), "")]


def test_every_action_has_a_bar_in_the_row_of_its_rank():
    bars = bars_of(PANELS[0])
    assert [(str(bar.action), bar.kind, bar.start, bar.end) for bar in bars] == [
        ("0F0", "F", 0, 3),
        ("0I0", "comm", 9, 10),
        ("0I0", "I", 10, 11),
        ("0W0", "W", 11, 12),
        ("1F0", "comm", 3, 4),
        ("1F0", "F", 4, 6),
        ("1B0", "B", 6, 9),
    ]
    assert all(bar.rank - 0.5 < bar.low < bar.high < bar.rank + 0.5 for bar in bars)
    transfers = [bar for bar in bars if bar.kind == "comm"]
    computed = [bar for bar in bars if bar.kind != "comm"]
    assert all(bar.high <= other.low for other in transfers for bar in computed if bar.rank == other.rank)
    assert {bar.colour for bar in bars} == set(COLOURS.values())


def test_two_actions_that_take_turns_share_the_row_and_name_each_other():
    bars = bars_of(Panel("folded", folded_in_turns(), "ms", scale=0.5))
    forward, backward = (bar for bar in bars if bar.beside)
    assert (forward.start, forward.end) == (backward.start, backward.end) == (2.5, 4.0)
    height = forward.high - forward.low
    assert forward.high == backward.low and bars[0].high - bars[0].low == pytest.approx(2 * height)
    assert forward.what == "0F1: forward of micro-batch 1, stage 0, rank 0, in turns with 3B0"
    assert backward.what == "3B0: backward of micro-batch 0, stage 3, rank 0, in turns with 0F1"


def test_later_stages_are_lighter_and_labels_are_readable():
    first, second = bars_of(PANELS[1])[-2:]
    assert first.colour == COLOURS["F"] and int(second.colour[1:], 16) > int(first.colour[1:], 16)
    colours = [*(COLOURS[kind] for kind in ("F", "W", "I", "comm")), "#000000", "#ffffff"]
    white, dark = "#ffffff", "#222222"
    assert [text_colour(colour) for colour in colours] == [white, white, dark, dark, white, dark]


def test_idle_shares_and_peaks_count_what_takes_turns_once_and_bytes_where_they_are_known():
    assert idle_shares(two_ranks()) == pytest.approx([7 / 12, 7 / 12])
    assert idle_shares(folded_in_turns()) == pytest.approx([4 / 8, 6 / 8])
    assert summary(PANELS[0]) == "makespan 12, bubble 58.3%, peak 1 activation"
    assert summary(Panel("b", folded_in_turns(), "ms", 0.5)) == "makespan 4 ms, bubble 62.5%, peak 2 GiB"


def test_the_figure_has_a_trace_for_each_kind_and_one_legend():
    figure = timeline_figure(PANELS)
    kinds = ["forward", "backward", "gradients of inputs", "gradients of weights", "transfer"]
    assert [trace.name for trace in figure.data] == [*kinds, "forward", "backward"]
    assert [trace.showlegend for trace in figure.data] == [True] * 5 + [False] * 2
    assert sum(len(trace.x) for trace in figure.data) == sum(len(bars_of(panel)) for panel in PANELS)
    assert figure.layout.xaxis.matches == "x2" and list(figure.layout.xaxis2.range) == [0, 12 * 1.005]
    assert list(figure.layout.yaxis.range) == [1.5, -0.5]
    assert "58% idle, 1 act." in figure.layout.yaxis.ticktext[0]
    assert "50% idle, 1 GiB" in figure.layout.yaxis2.ticktext[0]
    forward = figure.data[0]
    assert list(forward.customdata[1]) == ["1F0: forward of micro-batch 0, stage 1, rank 1", 4, 6]
    assert (forward.base[1], forward.x[1], forward.text[1]) == (4, 2, "0")
    many = timeline_figure([Panel(str(n), long_timeline(), "") for n in range(3)])
    assert len(many.data) == 9 and {len(trace.x) for trace in many.data} == {8 * 32}


def test_the_legend_has_the_colours_of_first_stages_in_one_order():
    mixed = timeline_figure(PANELS[::-1]).data[2:]
    assert [trace.marker.color[0] for trace in mixed] == list(COLOURS.values())
    assert [trace.legendrank for trace in mixed] == list(range(5))
    spans = [Span(0, "compute", Action("F", stage, 0), 3.0 - stage, 4.0 - stage) for stage in (3, 0)]
    later_first = dataclasses.replace(folded_in_turns(), spans=tuple(spans))
    assert timeline_figure([Panel("", later_first, "")]).data[0].marker.color[0] == COLOURS["F"]


def test_the_page_loads_nothing_escapes_titles_and_has_all_bars(tmp_path):
    path = tmp_path / "pipeline.html"
    write_page(path, "python -m graphmoe.pipeline_view out=<b>", PANELS)
    text = path.read_text()
    outside = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "out=&lt;b&gt;" in outside and "<b>" not in outside and "<mixed>" not in text
    assert not re.search(r"(src|href)=|url\(|@import", outside)
    assert not re.search(r"<script[^>]* src=", text) and "Plotly.react" in text
    (drawn,) = re.findall(r'<script type="application/json">(.*?)</script>', text)
    assert all(json.dumps(bar.what) in drawn for panel in PANELS for bar in bars_of(panel))
    assert outside.count("<tr>") == 1 + 3 + 2


def test_the_chart_is_a_png_as_high_as_its_ranks_need_or_says_why_not(tmp_path):
    heights = []
    for ranks in (2, 8):
        draw_chart(tmp_path / "a.png", [Panel("long", long_timeline(ranks), "")])
        height, width, _ = imread(tmp_path / "a.png").shape
        assert 1500 < width < 2500
        heights.append(height)
    assert 150 < heights[0] < heights[1] < 600
    with pytest.raises(ConfigError, match="cannot write the picture .*none/a.png"):
        draw_chart(tmp_path / "none" / "a.png", PANELS)
