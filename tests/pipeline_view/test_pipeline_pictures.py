"""Pictures of a pipeline's timelines: every action has its bar, in its place and with its words."""

from __future__ import annotations

import dataclasses
import json
import re
import sys

import pytest
from matplotlib.image import imread

from graphmoe.config.schema import ConfigError
from graphmoe.pipeline_view.bars import COLOURS, Panel, bars_of, idle_shares, summary, text_colour
from graphmoe.pipeline_view.chart import draw_chart
from graphmoe.pipeline_view.page import timeline_figure, write_page
from graphmoe.plan.pipeline.actions import Action
from graphmoe.plan.pipeline.simulate import Span
from tests.pipeline_timelines import folded_in_turns, long_timeline, two_ranks


def test_every_action_has_a_bar_in_the_row_of_its_rank():
    bars = bars_of(Panel("mixed", two_ranks(), ""))
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
    assert forward.high == backward.low and bars[0].high - bars[0].low == pytest.approx(
        2 * (forward.high - forward.low)
    )
    assert forward.what == "0F1: forward of micro-batch 1, stage 0, rank 0, in turns with 3B0"
    assert backward.what == "3B0: backward of micro-batch 0, stage 3, rank 0, in turns with 0F1"


def test_the_second_stage_of_a_rank_is_lighter_than_the_first():
    first, second = bars_of(Panel("folded", folded_in_turns(), ""))[-2:]
    assert first.colour == COLOURS["F"] and int(second.colour[1:], 16) > int(first.colour[1:], 16)


def test_labels_are_readable_on_their_bars():
    assert [text_colour(COLOURS[kind]) for kind in ("F", "W", "I", "comm")] == ["#ffffff"] * 2 + [
        "#222222"
    ] * 2
    assert text_colour("#000000") == "#ffffff" and text_colour("#ffffff") == "#222222"


def test_idle_shares_count_computation_only_and_once_for_what_takes_turns():
    assert idle_shares(two_ranks()) == pytest.approx([7 / 12, 7 / 12])
    assert idle_shares(folded_in_turns()) == pytest.approx([4 / 8, 6 / 8])


def test_the_summary_has_the_largest_peak_in_bytes_where_they_are_known():
    assert summary(Panel("a", two_ranks(), "")) == "makespan 12, bubble 58.3%, peak 1 activation"
    assert summary(Panel("b", folded_in_turns(), "ms", 0.5)) == "makespan 4 ms, bubble 62.5%, peak 2 GiB"


@pytest.fixture
def panels() -> list[Panel]:
    return [Panel("<mixed>", two_ranks(), ""), Panel("folded", folded_in_turns(), "")]


def test_the_figure_has_a_trace_for_each_kind_and_one_legend(panels):
    figure = timeline_figure(panels)
    assert [(trace.name, trace.showlegend) for trace in figure.data] == [
        ("forward", True),
        ("backward", True),
        ("gradients of inputs", True),
        ("gradients of weights", True),
        ("transfer", True),
        ("forward", False),
        ("backward", False),
    ]
    assert sum(len(trace.x) for trace in figure.data) == sum(len(bars_of(panel)) for panel in panels)
    assert figure.layout.xaxis.matches == "x2" and list(figure.layout.xaxis2.range) == [0, 12 * 1.005]
    assert list(figure.layout.yaxis.range) == [1.5, -0.5]
    assert "58% idle, 1 act." in figure.layout.yaxis.ticktext[0]
    assert "50% idle, 1 GiB" in figure.layout.yaxis2.ticktext[0]


def test_the_legend_has_the_colours_of_first_stages_in_one_order():
    figure = timeline_figure([Panel("folded", folded_in_turns(), ""), Panel("mixed", two_ranks(), "")])
    mixed = figure.data[2:]
    assert [trace.marker.color[0] for trace in mixed] == list(COLOURS.values())
    assert [trace.legendrank for trace in mixed] == list(range(5))
    spans = [Span(0, "compute", Action("F", stage, 0), 3.0 - stage, 4.0 - stage) for stage in (3, 0)]
    later_first = dataclasses.replace(folded_in_turns(), spans=tuple(spans))
    assert timeline_figure([Panel("", later_first, "")]).data[0].marker.color[0] == COLOURS["F"]


def test_the_pointer_shows_action_start_and_end(panels):
    forward = timeline_figure(panels).data[0]
    assert list(forward.customdata[1]) == ["1F0: forward of micro-batch 0, stage 1, rank 1", 4, 6]
    assert (forward.base[1], forward.x[1], forward.text[1]) == (4, 2, "0")
    assert "%{customdata[0]}" in forward.hovertemplate


def test_many_bars_make_few_traces():
    figure = timeline_figure([Panel(str(n), long_timeline(), "") for n in range(3)])
    assert len(figure.data) == 9 and {len(trace.x) for trace in figure.data} == {8 * 32}


def test_the_page_loads_nothing_escapes_titles_and_has_all_bars(panels, tmp_path):
    path = tmp_path / "pipeline.html"
    write_page(path, "python -m graphmoe.pipeline_view out=<b>", panels)
    text = path.read_text()
    outside = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "out=&lt;b&gt;" in outside and "<b>" not in outside and "<mixed>" not in text
    assert not re.search(r"(src|href)=|url\(|@import", outside)
    assert not re.search(r"<script[^>]* src=", text) and "Plotly.react" in text
    assert '<meta name="viewport"' in outside
    (drawn,) = re.findall(r'<script type="application/json">(.*?)</script>', text)
    for panel in panels:
        for bar in bars_of(panel):
            assert json.dumps(bar.what) in drawn
    assert outside.count("<tr>") == 1 + 3 + 2
    assert not path.with_suffix(".tmp").exists()


def test_the_chart_is_a_png_as_high_as_its_ranks_need(panels, tmp_path):
    heights = []
    for ranks in (2, 8):
        path = tmp_path / f"{ranks}.png"
        draw_chart(path, [Panel("long", long_timeline(ranks), "")])
        assert path.read_bytes().startswith(b"\x89PNG\r\n")
        height, width, _ = imread(path).shape
        assert 1500 < width < 2500
        heights.append(height)
    assert 150 < heights[0] < heights[1] < 600


def test_a_chart_that_cannot_be_written_or_drawn_says_so(panels, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="cannot write the picture .*none/a.png"):
        draw_chart(tmp_path / "none" / "a.png", panels)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"needs matplotlib: pip install 'graphmoe\[dev\]'; html=..."):
        draw_chart(tmp_path / "a.png", panels)
