"""The tool that shows schedules and layouts of a pipeline: its documents, tables, pictures and errors."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from graphmoe.config.schema import ConfigError
from graphmoe.pipeline_view import __main__ as tool
from graphmoe.pipeline_view.page import Panel, bars_of, idle_shares, summary, timeline_chart, write_page
from graphmoe.pipeline_view.plans import load_preset, median_costs
from graphmoe.plan.costs.segment_times import modelled_parts
from graphmoe.plan.pipeline.schedules import SCHEDULES, make_table, placement_of
from graphmoe.plan.pipeline.simulate import Costs, simulate
from graphmoe.runtime.pipeline.recorder import FILE_NAME, write_timelines
from tests.pipeline_timelines import folded_in_turns, two_ranks
from tests.runs import ROOT, document_of, refusal


def document(capsys, words):
    return document_of(tool.main, capsys, *words.split())


def shown(capsys, words):
    tool.main(words.split())
    return capsys.readouterr().out


def error_of(words):
    with pytest.raises(ConfigError) as caught:
        tool.main(words.split())
    return str(caught.value)


ZB1P = "schedule=zb1p stages=8 virtual_stages=1 microbatches=32 cost.f=1000 cost.b=1000 cost.w=1000"


def test_the_document_of_a_schedule_has_every_action_with_its_times(capsys):
    found = document(capsys, ZB1P)
    assert (found["schedule"], found["stages"], found["virtual_stages"]) == ("zb1p", 8, 1)
    assert found["makespan"] == 32 * 3000 + 7 * 1000
    assert found["bubble"] == pytest.approx(7000 / found["makespan"])
    assert found["peak_activations"] == [8.0] * 8 and found["peak_bytes"] is None
    assert found["ranks"] == [[rank] for rank in range(8)] and found["microbatches"] == 32
    for rank, actions in enumerate(found["actions"]):
        assert len(actions) == 3 * 32 and {action["stage"] for action in actions} == {rank}
        assert sum(action["end"] - action["start"] for action in actions) == 96_000
        assert found["busy"][rank] == pytest.approx(96_000 / found["makespan"])
    first = {"action": "0F0", "kind": "F", "stage": 0, "micro_batch": 0, "start": 0.0, "end": 1000.0}
    assert found["actions"][0][0] == first and found["transfers"] == [[]] * 8


@pytest.mark.parametrize("name", SCHEDULES)
def test_virtual_stages_share_the_cost_of_a_rank_for_which_the_table_is_made(name, capsys):
    found = document(capsys, f"schedule={name} stages=4 cost.f=3 cost.b=4 cost.w=1 cost.comm=0.1")
    assert found["virtual_stages"] == SCHEDULES[name].virtual_stages[0] and found["microbatches"] == 16
    for actions in found["actions"]:
        spans = {(action["start"], action["end"]) for action in actions}  # a pair has one
        assert sum(end - start for start, end in spans) == pytest.approx(16 * (3 + 4 + 1))
    costs = Costs.of_rank(placement_of(name, 4), 3, 4, 1, comm=0.1)
    assert found["makespan"] == simulate(make_table(name, 4, 16, costs=costs), costs).makespan


def test_a_schedule_that_is_slower_than_1f1b_is_said_to_be(capsys):
    words = "schedule=zbv,v_min stages=8 cost.f=1000 cost.b=2300 cost.w=600"
    none, said = (found["slower_than_1f1b"] for found in document(capsys, words)["schedules"])
    assert none is None and said.startswith("v_min is slower than 1f1b by simulation: bubble ")
    assert said in " ".join(shown(capsys, words).split())
    assert "slower_than_1f1b" not in document(capsys, "layout=Et|tL stages=2")


def test_several_schedules_are_a_list_in_the_order_that_was_asked(capsys):
    words = "schedule=interleaved,1f1b,interleaved virtual_stages=2,1,4 microbatches=8"
    found = document(capsys, words)["schedules"]
    assert [one["virtual_stages"] for one in found] == [2, 1, 4]
    assert found[2]["makespan"] < found[0]["makespan"] < found[1]["makespan"]
    text = shown(capsys, words)
    titles = [line.split(":")[0] for line in text.splitlines() if "bubble" in line]
    assert titles == ["interleaved, 2 stages a rank", "1f1b", "interleaved, 4 stages a rank"]
    assert text.rstrip().endswith("out=<folder> draws this")


def test_the_layout_in_the_documentation_is_that_of_the_model(capsys):
    page = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")
    line = r"^pipeline.schedule=zb1p: 4 stages on 4 ranks, .* layout (\S+)$"
    (said,) = re.findall(line, page, re.MULTILINE)
    assert document(capsys, "model=tiny stages=4 schedule=zb1p seq_len=256")["layout"] == said


def test_transfers_pairs_and_bytes_are_in_the_document(capsys):
    words = "schedule=1f1b stages=2 microbatches=8 overlap=true cost.hidden=400 cost.comm=10"
    found = document(capsys, f"{words} cost.activation_gib=0.5")
    pairs = [action for action in found["actions"][0] if "in_turns_with" in action]
    by_name = {action["action"]: action for action in pairs}
    assert pairs and all(by_name[pair["in_turns_with"]]["start"] == pair["start"] for pair in pairs)
    assert {pair["end"] - pair["start"] for pair in pairs} == {3000.0 - 400.0}
    assert {round(wait["end"] - wait["start"], 6) for wait in found["transfers"][1]} == {10.0}
    assert found["peak_bytes"] == [peak * 2**29 for peak in found["peak_activations"]]


@pytest.mark.parametrize("text", ['"Et|(tt|)*6L"', "Et|(tt|)*6L", "'E t | (t*2|)*6 L'"])
def test_a_layout_is_written_out_by_stage_and_by_rank(text, capsys):
    found = document_of(tool.main, capsys, f"layout={text}", "stages=4", "virtual_stages=2")
    assert found["pieces"] == ["Et", "tt", "tt", "tt", "tt", "tt", "tt", "L"]
    assert found["ranks"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert found["rank_pieces"] == [["Et", "tt"], ["tt", "tt"], ["tt", "tt"], ["tt", "L"]]
    assert (found["stages"], found["virtual_stages"]) == (4, 2) and "makespan" not in found


def test_a_layout_follows_its_pieces_is_folded_by_a_v_schedule_and_numbers_the_layers(capsys):
    folded = document(capsys, "layout=Et|(tt|)*6L schedule=zbv stages=4")
    assert folded["ranks"] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert folded["rank_pieces"][0] == ["Et", "L"] and folded["makespan"] > 0
    of_stages = document(capsys, "layout=Et|(tt|)*6L stages=4")
    assert of_stages["ranks"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert document(capsys, "layout=Et|(tt|)*6L")["ranks"] == [[n] for n in range(8)]
    rows = {" ".join(line.split()) for line in shown(capsys, "layout=Et|ttt|L").splitlines()}
    assert {"0 0 Et 0", "1 1 ttt 1 to 3", "2 2 L"} <= rows


def test_a_model_gives_layout_and_costs(capsys):
    words = "model=deepseek_v2_lite schedule=1f1b stages=4 microbatches=4 cost.f=10"
    found = document(capsys, words)
    modelled = modelled_parts(load_preset("deepseek_v2_lite"), 4096)
    assert sum(found["stage_ms"]) == pytest.approx(1e3 * sum(part.total for part in modelled))
    forwards = [next(a for a in actions if a["kind"] == "F") for actions in found["actions"]]
    times = [action["end"] - action["start"] for action in forwards]
    assert found["pieces"] == ["E" + "t" * 7, "t" * 7, "t" * 7, "t" * 6 + "L"]
    assert sum(times) == pytest.approx(40) and times[1] == pytest.approx(times[2])
    assert times[0] < times[1] - 0.01 and times[3] > times[1] + 0.01
    long = document(capsys, f"{words} seq_len=65536")
    assert sum(long["stage_ms"]) > sum(found["stage_ms"])
    assert "of the time" in shown(capsys, words)
    alone = document(capsys, "model=tiny stages=2")
    assert alone["pieces"] == ["Ett", "ttL"] and "actions" not in alone
    text = shown(capsys, "model=tiny schedule=1f1b,zb1p stages=2")  # which share a layout
    assert text.count("layout ") == 1 and text.count("bubble") == 2


def test_pictures_go_where_they_are_asked_to(capsys, tmp_path):
    words = f"schedule=1f1b,zb1p stages=2 microbatches=3 out={tmp_path / 'new' / 'folder'}"
    text = shown(capsys, words)
    assert [*tmp_path.rglob("*.*")] == [tmp_path / "new/folder/pipeline.html"]
    assert text.count("written:") == 1 and "draws this" not in text
    assert "schedule=1f1b,zb1p" in (tmp_path / "new/folder/pipeline.html").read_text()


@pytest.fixture
def run(tmp_path):
    timelines = {}
    for step, factor in ((10, 1.0), (20, 2.0), (30, 3.0), (40, 1.0), (50, 1.0)):
        costs = Costs((2e3 * factor, 3e3 * factor), (2e3, 3e3), (1e3, 1.5e3), activation_bytes=(2**30, 2**30))
        timelines[step] = simulate(make_table("zb1p", 2, 6), costs)
    write_timelines(tmp_path / FILE_NAME, timelines)
    return tmp_path


def test_a_run_is_shown_and_drawn_as_recorded_and_with_its_median_times(run, capsys, tmp_path):
    recorded, simulated = document(capsys, f"run={run}")["schedules"]
    assert recorded["title"] == "zb1p, step 50 as recorded" and recorded["unit"] == "ms"
    assert recorded["peak_bytes"] == [2 * 2**30, 2 * 2**30]
    assert simulated["makespan"] == pytest.approx(recorded["makespan"])  # the last step took the median
    slow = document(capsys, f"run={run} step=30 cost.comm=0.5")["schedules"]
    assert slow[0]["makespan"] > slow[1]["makespan"] > recorded["makespan"]
    waits = [wait["end"] - wait["start"] for rank in slow[1]["transfers"] for wait in rank]
    assert waits and waits == pytest.approx([0.5] * len(waits))
    text = shown(capsys, f"run={run} out={tmp_path}")
    assert re.search(r"step 50 as recorded: makespan [\d,.]+ ms, bubble [\d.%]+, peak 2 GiB", text)
    assert "makespan: from the first start to the last end of any rank\n" in text
    assert "time, ms" in (tmp_path / "pipeline.html").read_text()
    assert "10, 20, 30" in (error := error_of(f"run={run} step=11")) and "step=11 is not in" in error


@pytest.mark.parametrize(
    ("words", "unit", "weighs"),
    [("stages=2", "cost.f=1000", None), ("stages=2 cost.f=2.5 layout=Et|tL", "cost.f=2.5", False),
     ("stages=2 model=tiny", "cost.f=1000, in the mean of ranks", True),
     ("stages=2 model=tiny layout=Etttt|L", "cost.f=1000, in the mean of ranks", True)],
)  # fmt: skip
def test_the_makespan_is_named_with_its_unit_and_stages_that_are_not_weighed(words, unit, weighs, capsys):
    text = shown(capsys, f"schedule=1f1b {words}")
    assert re.search(r"^1f1b: makespan [\d,.]+, bubble", text, re.MULTILINE)
    said = "of any rank, in the unit of costs: a rank's forward of one micro-batch is"
    assert f"{said} {unit} " in " ".join(text.split())
    assert ("all stages cost the same here" in text) == (weighs is False)


def test_median_times_of_pairs_are_what_they_save():
    costs = Costs((5.0, 6.0), (4.0, 4.0), (3.0, 3.0), comm=0.5, hidden=2.0)
    timeline = simulate(make_table("1f1b", 2, 12, overlap=True), costs)
    found = median_costs([timeline], comm=0.5)
    assert found.forward == (5.0, 6.0) and found.hidden == pytest.approx(2.0)
    whole = [i + w for i, w in zip(found.backward_input, found.backward_weight, strict=True)]
    assert whole == pytest.approx([7.0, 7.0])
    again = simulate(make_table("1f1b", 2, 12, overlap=True), found)
    assert again.makespan == pytest.approx(timeline.makespan)


def test_a_step_that_is_not_whole_is_shown_as_an_error(tmp_path):
    timeline = dataclasses.replace(two_ranks(), spans=two_ranks().spans[2:])
    write_timelines(tmp_path / FILE_NAME, {1: timeline})
    said = f"step 1 of {tmp_path / FILE_NAME} is not a complete step: mixed: rank 0 at 0I0"
    assert said in error_of(f"run={tmp_path}")


WRONG = (
    ("", "nothing to show; use schedule=1f1b,zb1p, layout='Et|tL', model=deepseek_v2_lite or run=..."),
    ("schedule=zb2", "schedule=zb2: there is no such choice; use one of gpipe, 1f1b, interleaved"),
    ("schedule=1f1b stages=0 microbatches=0", "stages=0 must be 1 or more; microbatches=0 must be 1 or more"),
    ("schedule=1f1b cost.f=0 cost.w=-1", "cost.f=0.0 must be greater than 0, and at most 1e+100; cost.w=-1"),
    ("schedule=1f1b cost.comm=inf", "cost.comm=inf must be 0 or greater"),
    ("schedule=zbv cost.f=1e308", "cost.f=1e+308 must be greater than 0, and at most 1e+100"),
    ("schedule=1f1b stages=1000000000", "with 4000000000 micro-batches would take minutes"),
    ("schedule=1f1b stages=64 microbatches=100000", "use fewer stages, or at most microbatches=1024"),
    ("schedule=1f1b virtual_stages=2", "virtual_stages=2 does not suit schedule=1f1b"),
    ("schedule=1f1b virtual_stages=0", "virtual_stages=0 must be 1 or more"),
    ("schedule=1f1b,zb1p virtual_stages=1,1,1", "has 3 numbers for 2 schedules; give one for all, or one"),
    ("schedule=v_min overlap=true", "overlap=true runs a forward and a backward together"),
    ("schedule=1f1b cost.hidden=1", "cost.hidden=1.0 is for overlap=true"),
    ("schedule=1f1b seq_len=9", "seq_len=9 sets the costs of a model's parts; add model=..."),
    ("schedule=1f1b model=tinyy", "model=tinyy is not a preset; did you mean 'tiny'?"),
    (
        "schedule=1f1b model=tiny cost.b=1",
        "model=tiny determines the cost of backwards; leave out cost.b=1.0",
    ),
    ("model=tiny stages=8", "stages * virtual_stages = 8, and the model has 6 parts (Et*4L)"),
    ("model=tiny layout=Et|tL", "layout: t occurs 2 times, but model.num_layers=4; add 2\n  Et|tL\n     ^"),
    ("layout=Et|tL stages=3", "layout: 2 pieces, and stages * virtual_stages = 3; use 2 borders |"),
    ("layout=Et|tL cost.f=3 out=x", "cost.f, out: nothing is simulated or drawn without a schedule; add"),
    ("schedule=1f1b step=3", "step=3 selects a step of a run; add run=..."),
    ("run=x schedule=1f1b seq_len=9 cost.w=0", "run=x determines schedule, seq_len, cost.w; leave"),
    ("run=x", "there is no x/pipeline.json; a run with profile.pipeline=true writes it"),
    ("schedule=1f1b out=there.txt", "out=there.txt is a file; name a folder"),
)


def test_what_cannot_be_shown_is_named_with_what_would_do(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("there.txt").touch()
    answers = {words: error_of(words) for words, _ in WRONG}
    assert {words: answers[words] for words, said in WRONG if said not in answers[words]} == {}
    assert "schedule=zb2" in refusal(tool.main, capsys, "schedule=zb2")


PANELS = [Panel("<mixed>", two_ranks(), ""), Panel("folded", folded_in_turns(), "")]


def test_every_action_has_a_bar_in_the_row_of_its_rank_and_two_that_take_turns_share_it():
    bars = bars_of(PANELS[0])
    shown = ", ".join(f"{bar.action} {bar.kind} {bar.start:g}-{bar.end:g}" for bar in bars)
    first = "0F0 F 0-3, 0I0 comm 9-10, 0I0 I 10-11, 0W0 W 11-12"
    assert shown == f"{first}, 1F0 comm 3-4, 1F0 F 4-6, 1B0 B 6-9"
    assert all(bar.rank - 0.5 < bar.low < bar.high < bar.rank + 0.5 for bar in bars)
    forward, backward = (bar for bar in bars_of(PANELS[1]) if bar.beside)
    assert (forward.start, forward.end) == (backward.start, backward.end) and forward.high == backward.low
    assert forward.what == "0F1: forward of micro-batch 1, stage 0, rank 0, in turns with 3B0"


def test_idle_shares_and_peaks_count_what_takes_turns_once_and_bytes_where_they_are_known():
    assert idle_shares(two_ranks()) == pytest.approx([7 / 12, 7 / 12])
    assert idle_shares(folded_in_turns()) == pytest.approx([4 / 8, 6 / 8])
    assert summary(PANELS[0]) == "makespan 12, bubble 58.3%, peak 1 activation"
    assert summary(Panel("b", folded_in_turns(), "ms", 0.5)) == "makespan 4 ms, bubble 62.5%, peak 2 GiB"
    axes = timeline_chart(PANELS).layout
    first, second = (axes[name]["ticktext"] for name in ("yaxis", "yaxis2"))
    assert "58% idle, 1 act." in first[0] and "50% idle, 1 GiB" in second[0]


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
