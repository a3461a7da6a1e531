"""A search finds what brute force finds, and says of each other candidate why it does not run."""

import html
import itertools
import re
import shlex
from dataclasses import replace
from typing import Any

import pytest

from graphmoe.config.schema import ConfigError, RunConfig
from graphmoe.plan.costs.hardware import CARDS
from graphmoe.plan.costs.rates import Speeds, default_rates
from graphmoe.plan.pipeline.check import in_flight, largest, peaks
from graphmoe.plan.pipeline.schedules import SCHEDULES, make_table, placement_of
from graphmoe.plan.pipeline.simulate import Costs
from graphmoe.plan.rules import check, resolve
from graphmoe.project import step_time
from graphmoe.project.arguments import ProjectArgs, completed, fixed_keys, to_change, train_command
from graphmoe.project.arguments import check as check_args
from graphmoe.project.candidates import Candidates
from graphmoe.project.document import MEMORY_ERROR, project
from graphmoe.project.search import search
from graphmoe.project.tables import listed, render_search, write_search
from tests.plan.costs.test_activations import MODEL
from tests.runs import text_of, undecided_config

OPEN = ("launch.fake_world=null", "launch.nproc=8", "train.global_batch_size=32", "model.num_layers=6")
OPEN += ("graph.scope=none", "pipeline.ep_overlap=false")
SMALL = {"memory_gb": 0.78}
"""Card on which some candidates for the model of these tests fit, and some do not."""


def configured(*words: str) -> RunConfig:
    return undecided_config(*MODEL, *OPEN, *words)


def searched(args: ProjectArgs, *words: str, of_file: tuple[str, ...] | None = None, **named: Any):
    run = configured(*(words if of_file is None else of_file))
    return search(resolve(completed(run, args, fixed_keys(words))), args, words, **named)


def projected(words: str, args: ProjectArgs):
    named = {"recompute=none": [], "recompute=all": ["recompute.all=true"]}
    typed = [part for word in words.split() for part in named.get(word, [word])]
    run = completed(configured(*typed), replace(args, search=False))
    check(run)
    return project(resolve(run), args)


def has_its_own_numbers(line, document) -> bool:
    keys = ("tokens_per_s_per_gpu", "memory_gb", "bubble", "layout", "pipeline")
    return all(document[key] == line[key] for key in keys)


@pytest.fixture
def small_card(monkeypatch):
    monkeypatch.setitem(CARDS, "h200", replace(CARDS["h200"], **SMALL))
    return ProjectArgs("h200", search=True, top=5)


def test_the_best_are_those_of_brute_force(small_card):
    everything, best = (searched(replace(small_card, top=top), *NARROW) for top in (10_000, 5))
    assert best["num_simulated"] < everything["num_simulated"] == best["num_fitting"]
    assert best["rejected"] == everything["rejected"] != []
    rates = [line["tokens_per_s_per_gpu"] for line in everything["best"]]
    assert rates == sorted(rates, reverse=True)
    assert best["best"] == everything["best"][:5]
    for line in best["others_that_fit"]:
        same = next(other for other in everything["best"] if other["words"] == line["words"])
        assert same["tokens_per_s_per_gpu"] == pytest.approx(line["about_tokens_per_s_per_gpu"], rel=0.15)
        assert same["memory_gb"]["total"] == pytest.approx(line["total_gb"])


def test_listed_are_the_best_of_each_shape_that_leave_a_margin(small_card):
    shown: list[str] = []
    found = searched(replace(small_card, top=1000), *NARROW, show=shown.append)
    lines = found["shapes"]
    fitting = [line for line in found["best"] if line["fits_with_margin"]]
    for line in lines:
        same = [other for other in fitting if other["layout"] == line["layout"]]
        assert line["tokens_per_s_per_gpu"] == max(other["tokens_per_s_per_gpu"] for other in same)
    assert len(lines) == len({tuple(line["layout"].values()) for line in fitting}) > 3
    assert searched(replace(small_card, top=2), *NARROW)["shapes"] == lines[:2]
    shared = [line for line in lines if line["layout"]["ep"] == 8]
    assert found["with_ep"] == next(iter(shared), None) != found["recommended"] and shared
    assert {found["with_ep"]["words"]} < {line["words"] for line in listed({**found, "shapes": lines[:1]})}
    assert "the best with parallel.ep of 8 or more, " in text_of(render_search(found), width=1000)
    rates = [float(line.split()[1].replace(",", "")) for line in shown]
    assert rates and all(1.1 * one <= other * 1.001 for one, other in itertools.pairwise(rates))


AUTOMATIC = ("graph.scope=auto", "pipeline.ep_overlap=auto")


def test_a_search_varies_dispatcher_scope_overlap_and_layers_to_recompute(monkeypatch):
    words = ("parallel.tp=1", "parallel.cp=1", "compile.enabled=true", "train.micro_batch_size=1", *AUTOMATIC)
    found = on_card(SMALL["memory_gb"], monkeypatch, *words)
    of_words = [line["words"] for line in [*found["best"], *found["others_that_fit"]]]
    shared = [each for each in of_words if "parallel.pp=1 parallel.ep=8" in each]
    chosen = ("moe.dispatcher", "graph.scope", "pipeline.ep_overlap")  # a run chooses the fastest by itself
    assert shared and not any(key in each for each in shared for key in chosen)
    assert not any("ep_overlap" in each for each in found["others_that_fit"] if "pp=1 " not in each["words"])
    for fixed, missing in (("moe.dispatcher=alltoall", "symm"), ("graph.scope=none", "full_iteration")):
        of_fixed = on_card(SMALL["memory_gb"], monkeypatch, *words[:-2], "parallel.ep=8", fixed)
        assert of_fixed["best"] and not any(missing in line["words"] for line in of_fixed["best"])
        assert not any(fixed in line["words"] for line in of_fixed["best"])


def test_other_dispatchers_name_themselves_and_uncaptured_pipelines_their_scope(small_card):
    tried = Candidates(configured(*AUTOMATIC), small_card, frozenset())
    plain = [modes for modes in tried.layouts() if modes[0][0].layout.tp == modes[0][0].layout.cp == 1]
    ways = {(modes[0][0].layout.pp, modes[0][0].layout.ep): modes for modes in plain}
    for pp, ep, scope in ((1, 8, "partial"), (2, 4, "none")):
        (first, _), (second, problems) = ways[pp, ep]
        assert first.config.moe.dispatcher == "symm" and "moe.dispatcher" not in first.words
        assert (first.config.graph.scope, first.config.pipeline.ep_overlap) == ("full_iteration", pp == 1)
        assert second.config.moe.dispatcher == "alltoall" and " moe.dispatcher=alltoall" in second.words
        assert second.config.graph.scope == scope and not problems
        assert ("graph.scope=none" in second.words) == (scope == "none")
        captured = [one for changes in tried.variants(second) for one in changes]
        assert [one.words.endswith("graph.scope=partial") for one in captured] == [True] * (pp > 1)


def test_recompute_of_some_layers_takes_the_place_of_that_of_all(small_card):
    tried = Candidates(configured(*AUTOMATIC), small_card, frozenset())
    of_layouts = (modes[0][0] for modes in tried.layouts())
    whole = next(one for one in of_layouts if (one.layout.pp, one.layout.ep) == (4, 2))
    pairs, changes = tried.variants(tried.recomputing(whole, "recompute=all"))
    assert [one.words.endswith(" pipeline.ep_overlap=true") for one in pairs] == [True]
    kinds = [one.kind for one in changes]
    assert kinds == [f"recompute.layer_ids=[{','.join(map(str, range(n)))}]" for n in (1, 3, 4)]
    assert all(one.kind in one.words and "recompute=all" not in one.words for one in changes)
    assert [[*one.config.recompute.layer_ids] for one in changes] == [[0], [0, 1, 2], [0, 1, 2, 3]]


def test_a_node_may_have_any_number_of_gpus(small_card):
    words = ("launch.nproc=6", "parallel.pp=1", "parallel.cp=1", "train.micro_batch_size=1")
    command = searched(small_card, *words, "train.global_batch_size=12")["recommended"]["command"]
    assert command.endswith("launch.nproc=6 launch.nodes=1") and command.count("launch.nproc") == 1
    near, far = (replace(CARDS["h200"], per_node=count) for count in (4, 2))
    seconds = [Speeds(card, default_rates(is_nvidia=True)).exchange(1e9, 4) for card in (near, far)]
    assert seconds[1] > 2 * seconds[0]


def test_precision_varies_where_it_is_asked_for(small_card):
    words = (*NARROW, "parallel.pp=1", "compile.enabled=true")
    plain, both = (searched(replace(small_card, try_fp8=asked, top=1000), *words) for asked in (False, True))
    assert {line["fp8"] for line in plain["best"]} == {"none"}
    found = {recipe: [x for x in both["best"] if x["fp8"] == recipe] for recipe in ("none", "rowwise")}
    of_words = [[{k: v for k, v in x.items() if k != "command"} for x in lines] for lines in found.values()]
    assert of_words[0] == plain["best"] and of_words[1]
    in_bf16 = {line["words"] for line in of_words[0]}  # with the same dispatcher too
    assert {line["words"].replace(" precision.fp8=rowwise", "") for line in of_words[1]} == in_bf16
    estimated = searched(replace(small_card, try_fp8=True, top=1), *words)["others_that_fit"]
    sizes = {line["words"]: line["memory_gb"]["total"] for line in both["best"]}
    assert len(estimated) > 6
    assert all(line["total_gb"] == pytest.approx(sizes[line["words"]]) for line in estimated)
    for line in found["rowwise"]:
        assert "precision.fp8=rowwise" in line["words"]
        assert has_its_own_numbers(line, projected(f"{line['words']} train.micro_batch_size=1", small_card))
    shown = text_of(render_search(both))
    assert "with and without products of experts" in shown and " fp8" in shown
    best = {**both, "recommended": {**both["recommended"], **found["rowwise"][0]}}
    rate = f"{plain['best'][0]['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU"
    assert f"; without products in 8 bits dp has {rate}:" in text_of(render_search(best), width=300)
    assert "no products in 8 bits" in text_of(render_search(plain))
    given = searched(small_card, *words, "precision.fp8=rowwise")
    assert {line["fp8"] for line in given["best"]} == {"rowwise"}
    assert "precision.fp8" not in given["best"][0]["words"]
    for args, typed in ((replace(small_card, search=False), []), (small_card, ["precision.fp8=none"])):
        with pytest.raises(ConfigError, match="try_fp8=true"):
            check_args(replace(args, try_fp8=True), typed)


NARROW = ("parallel.tp=1", "parallel.cp_method=alltoall", "train.micro_batch_size=1")


def on_card(memory_gb: float, monkeypatch, *words: str, top: int = 10_000):
    monkeypatch.setitem(CARDS, "h200", replace(CARDS["h200"], memory_gb=memory_gb))
    return searched(ProjectArgs("h200", search=True, top=top), *words)


@pytest.mark.slow
def test_the_fastest_that_leaves_a_margin_is_recommended_also_where_it_is_not_listed(
    small_card, monkeypatch, tmp_path
):
    total = searched(small_card, *NARROW)["best"][0]["memory_gb"]["total"]
    card = 1.03 * total
    everything = on_card(card, monkeypatch, *NARROW)
    for line in everything["best"]:
        assert line["left_gb"] == pytest.approx(card - line["memory_gb"]["total"])
        assert line["fits_with_margin"] == (line["left_gb"] >= MEMORY_ERROR * card)
    safe = [line for line in everything["best"] if line["fits_with_margin"]]
    found = on_card(card, monkeypatch, *NARROW, top=1)
    assert not found["best"][0]["fits_with_margin"] and safe
    assert found["recommended"] == {**safe[0], "command": found["recommended"]["command"]}
    text = text_of(render_search(found), width=1000)
    assert found["recommended"]["command"] in text and "the fastest that is not near the limit" in text
    assert "! Near the limit: " not in text  # only what leaves a margin is listed
    write_search(tmp_path / "page.html", "command", found)
    page = html.unescape((tmp_path / "page.html").read_text())
    assert found["recommended"]["command"] in page and "<td>! " not in page


@pytest.mark.slow
def test_where_nothing_leaves_a_margin_the_fastest_is_recommended_with_a_warning(small_card, monkeypatch):
    words = (*NARROW, "parallel.ep=1")  # others have slower modes that need less
    everything = on_card(SMALL["memory_gb"], monkeypatch, *words)
    least = min(line["memory_gb"]["total"] for line in everything["best"])
    found = on_card(1.01 * least, monkeypatch, *words)
    assert not any(line["fits_with_margin"] for line in found["best"])
    assert found["recommended"]["words"] == found["best"][0]["words"]
    shown = text_of(render_search(found), width=1000)
    assert "GB of the card's 0 left, as all that fit are near the limit" in shown


def test_a_layout_near_the_limit_is_listed_again_with_what_leaves_a_margin(monkeypatch):
    fixed = ("parallel.tp=1", "parallel.cp=1", "parallel.ep=1", "parallel.pp=4", "pipeline.schedule=1f1b")
    fixed += ("train.micro_batch_size=16", "train.global_batch_size=256")
    kinds = Candidates(configured(*fixed), ProjectArgs("h200"), frozenset()).kinds
    totals = {kind: total_gb(kind, *fixed) for kind in kinds}
    found = on_card(1.01 * totals["recompute=none"], monkeypatch, *fixed)
    listed = {line["recompute"]: line["fits_with_margin"] for line in found["best"]}
    assert listed.pop("recompute=none") is False
    (other,) = totals.keys() & listed
    assert listed[other] and totals[other] < 0.96 * totals["recompute=none"]
    # recompute of some layers too, if that is faster
    assert all(fits and "layer_ids=[0" in kind for kind, fits in listed.items() if kind != other)


def total_gb(words: str, *fixed: str) -> float:
    return projected(" ".join((words, *fixed)), ProjectArgs("h200"))["memory_gb"]["total"]


def test_the_command_starts_a_run_of_the_recommended_layout(small_card):
    words = ("parallel.ep=2", "recompute.ops=[layernorm]", "format=json")
    command = searched(small_card, *words)["recommended"]["command"]
    python, flag, module, *typed = shlex.split(command)
    assert (python, flag, module) == ("python", "-m", "graphmoe.train")
    assert typed[:2] == [*words[:2]] and "'recompute.ops=[layernorm]'" in command
    assert typed[-2:] == ["launch.nproc=8", "launch.nodes=1"] and "format=json" not in typed
    typed.remove("data=synthetic")  # a group's option
    check(configured(*typed))


OF_A_FILE = ("parallel.etp=2", "pipeline.virtual_stages=2")
OF_A_FILE += ("recompute.segments=[moe_experts]", "recompute.layer_ids=[1]")


@pytest.mark.slow
def test_a_listed_layout_has_its_own_numbers_also_where_a_file_set_what_a_search_replaces(small_card):
    """Words that nobody typed are a file's: candidates have other values, which their words must say."""
    found = searched(small_card, "model.num_experts=8")
    assert all(has_its_own_numbers(line, projected(line["words"], small_card)) for line in found["best"])
    said: list[str] = []
    found = searched(small_card, *NARROW, of_file=OF_A_FILE, report=said.append)
    assert {"parallel.etp=1", "pipeline.virtual_stages=null"} < {*found["recommended"]["words"].split()}
    for line in found["best"]:
        assert has_its_own_numbers(line, projected(" ".join((*OF_A_FILE, line["words"])), small_card)), line
    assert re.fullmatch(r"looking for layouts: \d+ fit, \d+ do not run", said[-2])
    assert said[-1].startswith("projecting the fastest of ")


def test_each_size_of_micro_batches_is_tried_up_to_the_first_that_does_not_fit(small_card):
    words = ("parallel.tp=1", "parallel.cp=1", "parallel.ep=8")
    automatic = ("graph.scope=auto", "pipeline.ep_overlap=auto")
    found = searched(replace(small_card, top=10_000), *words, *automatic)
    assert found["micro_batch_sizes"] == [1, 2, 4, 8, 16]
    sizes = {line["micro_batch_size"] for line in found["best"]}
    assert len(sizes) > 1
    for line in found["best"]:
        assert f"train.micro_batch_size={line['micro_batch_size']}" in line["words"]
        own = projected(" ".join((line["words"], *words, *automatic)), small_card)
        assert has_its_own_numbers(line, own), own["auto"]
        assert line["micro_batches"] * line["micro_batch_size"] * line["layout"]["dp"] == 32
    (given,) = searched(small_card, *words, "train.micro_batch_size=2")["micro_batch_sizes"]
    assert given == 2
    assert not any("train.micro_batch_size=16" in line["words"] for line in found["rejected"])


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb1p", "zbv"])
def test_long_pipelines_are_projected_from_shorter_ones(schedule, monkeypatch):
    words = f"parallel.pp=4 parallel.ep=2 pipeline.schedule={schedule} train.micro_batch_size=1"
    words += " train.global_batch_size=400"
    short = projected(words, ProjectArgs("h200"))
    assert short["micro_batches"] == 200 > 16 * 4
    monkeypatch.setattr(step_time, "SIMULATED", 1000)
    whole = projected(words, ProjectArgs("h200"))
    assert short["memory_gb_per_rank"] == whole["memory_gb_per_rank"]
    assert short["step_time_s"] == pytest.approx(whole["step_time_s"], rel=0.005)


def test_a_command_for_several_nodes_names_where_they_meet_and_data():
    words = ("parallel.ep=2", "data=memmap", "data.paths=[a]")
    alone, several = (train_command(words, "", ProjectArgs("h200", nodes=nodes)) for nodes in (1, 2))
    checked = "With launch.fake_world=8 launch.fake_memory_gb=141 added, it is only checked"
    assert "launch.endpoint" not in alone and to_change(alone, 141.0).startswith(checked)
    assert several.endswith("launch.nproc=8 launch.nodes=2 launch.endpoint=node0:29500")
    said = "Run it on each node, with the first node's name for node0:29500;"
    assert to_change(several, 141).startswith(said)
    bare = train_command((), "", ProjectArgs("h200"))
    assert to_change(bare, 141).startswith("Replace ")


def test_what_has_no_projection_or_no_layout_is_refused(small_card):
    with pytest.raises(ConfigError, match="not projected: "):
        searched(small_card, "passes.disabled=[fuse_experts]")
    with pytest.raises(ConfigError, match=r"on 8 ranks: parallel.ep=16 .* does not divide the 8[^;]*$"):
        searched(small_card, "parallel.ep=16", "model.num_experts=16")


@pytest.mark.slow
def test_candidates_that_are_too_large_say_by_how_much_and_what_is_largest(small_card):
    found = searched(small_card, "parallel.cp=1")
    large = [line for line in found["rejected"] if line["reason"].startswith("most are ")]
    assert large
    for line in large[::20]:
        memory = projected(line["words"], small_card)["memory_gb"]
        assert line["total_gb"] == pytest.approx(memory["total"])
        largest = max((kind for kind in memory if kind != "total"), key=memory.__getitem__)
        assert line["reason"].startswith(f"most are {largest}, {memory[largest]:,.1f} of")
        assert f"{memory['total'] - SMALL['memory_gb']:,.1f} too many" in line["reason"]


def test_rules_of_a_run_are_the_reasons_of_what_they_forbid(small_card):
    reasons = {line["reason"] for line in searched(small_card, "parallel.pp=1")["rejected"]}
    assert any("parallel.tp=8 does not divide model.num_heads=4" in reason for reason in reasons)
    assert not any("use " in reason for reason in reasons)  # a search tries other layouts itself


@pytest.mark.slow
def test_keys_of_the_command_line_stay(small_card):
    words = ("parallel.ep=2", "pipeline.schedule=zbv", "recompute.all=true")
    found = searched(small_card, *words)
    assert found["best"]
    for line in found["best"]:
        assert line["layout"]["ep"] == 2
        assert line["pipeline"] is None or line["pipeline"]["schedule"] == "zbv"
        assert not any(key in line["words"] for key in ("parallel.ep=", "pipeline.schedule=", "recompute"))


def layouts_of(*words):
    args = ProjectArgs("h200", search=True)
    run = resolve(completed(configured(*words), args))
    return [each for modes in Candidates(run, args, frozenset()).layouts() for each, _ in modes]


def test_experts_are_cut_only_where_there_are_too_few_to_share():
    layouts = [each.layout for each in layouts_of("model.num_experts=2")]
    sizes = {(layout.tp, layout.ep, layout.etp) for layout in layouts}
    assert (2, 1, 2) not in sizes and (2, 2, 2) in sizes


@pytest.mark.parametrize("decided", ["auto", "none", "replicas"])
def test_layouts_have_the_balance_that_a_file_decided(decided):
    found = layouts_of(f"moe.balance={decided}", "moe.dispatcher=symm", "parallel.ep=8")
    of_layouts = [each for each in found if each.layout.etp == 1]
    shared = {each.config.moe.balance.value for each in of_layouts if each.layout.ep > 1}
    assert shared == {decided.replace("auto", "replicas")}


@pytest.mark.parametrize("name", [name for name, facts in SCHEDULES.items() if not facts.keeps_all])
def test_two_micro_batches_for_each_rank_fill_a_pipeline(name):
    virtual = (2, 3) if name == "interleaved" else (SCHEDULES[name].virtual_stages[0],)
    overlaps = (False, True) if SCHEDULES[name].build_overlapped else (False,)
    for ranks, stages, overlap in itertools.product((2, 3, 5), virtual, overlaps):
        for rest in range(ranks):
            fills = 2 + (name == "dualpipe_v" or overlap and name == "zbv")
            counts = (fills * ranks + rest, 5 * ranks + rest)
            short, long = (make_table(name, ranks, each, stages, overlap=overlap) for each in counts)
            assert [*map(set, in_flight(short))] == [*map(set, in_flight(long))], (ranks, stages, overlap)


def held(moments):
    """The most activations by stage, before their dgrad or wgrad."""
    halves = ((each[: len(each) // 2], each[len(each) // 2 :]) for each in moments)
    return {*largest(tuple(map(sum, zip(*pair, strict=True))) for pair in halves)}


@pytest.mark.parametrize("ratio", [(1, 1, 0.5), (1, 2.2, 0.3), (1, 1.3, 2.1), (1, 1.6, 0.9)])
@pytest.mark.parametrize(
    "name, paired",
    [*((name, False) for name in ("zbv", "v_half", "v_min", "dualpipe_v")), ("zb1p", True), ("zbv", True),
     ("dualpipe_v", True)],
)  # fmt: skip
def test_short_tables_that_follow_costs_stand_for_long_ones(name, paired, ratio):
    fills = 3 if paired or name == "dualpipe_v" else 2
    for num_ranks in (3, 4, 6):
        costs = Costs.of_rank(placement_of(name, num_ranks), *ratio, comm=0.02)
        costs = replace(costs, forward=tuple(c * (1 + i % 3 / 4) for i, c in enumerate(costs.forward)))
        asked = {"costs": costs, "stands_for": 7 * num_ranks, "overlap": paired}
        short, long = (make_table(name, num_ranks, each * num_ranks, **asked) for each in (fills, 7))
        assert [*map(held, in_flight(short))] == [*map(held, in_flight(long))]
        sizes = [1 + stage % 4 for stage in range(short.placement.num_stages)]
        assert peaks(short, sizes) == peaks(long, sizes)
        for share in (0.3, 0.6, 1):  # more only if all is recomputed; listed layouts have whole tables
            deferred = [share * size for size in sizes]
            assert peaks(short, sizes, deferred) == peaks(long, sizes, deferred)
