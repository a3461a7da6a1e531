"""The command line of projections: its document, tables and errors, and what the documentation says of it."""

import itertools
import json
import re
import shlex
import sys
import typing
from typing import Any, NamedTuple

import pytest
from hydra.core.global_hydra import GlobalHydra

from graphmoe.command.errors import known_keys
from graphmoe.config.arguments import run_tool
from graphmoe.project.__main__ import EXAMPLES, main
from graphmoe.project.arguments import ProjectArgs, check_words
from graphmoe.project.tables import verdict
from graphmoe.training.memory import MEMORY_KINDS
from tests.runs import ROOT
from tests.test_docs import rows_below


class Result(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def project(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def project(*words: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["project", *words])
        GlobalHydra.instance().clear()
        status = 0
        try:
            run_tool(main)
        except SystemExit as end:
            status = int(end.code or 0)
        finally:
            GlobalHydra.instance().clear()
        return Result(status, *capsys.readouterr())

    return project


@pytest.fixture
def document(project):
    def document(*words: str) -> Any:
        result = project(*words, "format=json")
        assert result.status == 0, result.err
        return json.loads(result.out)

    return document


CHART = "model=moe_1t train.micro_batch_size=1 nodes=96 moe.dispatcher=alltoall graph.scope=none"
SMALL = ("hardware=h200", "nodes=1", "data.seq_len=128")


def test_every_rank_is_listed_and_drawn_and_the_worst_is_one_of_them(document, tmp_path):
    words = ("parallel.pp=2", "model.num_layers=6", "pipeline.schedule=zbv")
    page = tmp_path / "one.html"
    found = document(*SMALL, *words, f"page={page}")
    text = page.read_text()
    said = ("<h1>graphmoe: tiny on 8 H200, projected</h1>", "links between nodes are assumed")
    assert all(each in text for each in (*said, "Not counted in memory: the device"))
    for said in (*MEMORY_KINDS[:-1], "moe_experts", "0..3", "4..7", "card, 141 GB"):
        assert f'"{said}"' in text, said
    ranks = found["memory_gb_per_rank"]
    assert len(ranks) == 8 and tuple(ranks[0]) == MEMORY_KINDS
    assert found["memory_gb"] == (worst := ranks[found["worst_rank"]])
    assert worst["total"] == pytest.approx(sum(worst[kind] for kind in MEMORY_KINDS[:-1]))
    assert found["memory_gb"]["total"] == max(rank["total"] for rank in ranks)
    assert found["micro_batches"] == 8 and found["compute"] == "bf16"
    by_segment, by_layer = found["activations_gb_by_segment"], found["activations_gb_by_layer"]
    assert sum(by_segment.values()) == pytest.approx(sum(by_layer.values()))
    assert sum(found["buffers_gb"].values()) == pytest.approx(found["memory_gb"]["buffers"])


def test_tables_end_in_a_verdict(project):
    result = project(*SMALL, "parallel.pp=2", "parallel.ep=2")
    assert result.status == 0 and "fits: rank" in result.out.splitlines()[-1], result.err
    words = ("parallel.pp=24", "parallel.ep=8", "pipeline.schedule=interleaved", "pipeline.virtual_stages=4")
    result = project(*CHART.split(), "hardware=mi300x", *words)
    words = " ".join(result.out.split())
    assert words.count("DOES NOT FIT: rank 0 needs") == 2 and "most are activations" in words
    assert result.out.splitlines()[1].startswith("DOES NOT FIT")
    assert "Time of a step if there were memory" in words and "tokens/s/GPU if there were memory" in words
    assert "1 micro-batch of 1" in " ".join(project(*SMALL, "train.micro_batch_size=1").out.split())


@pytest.mark.parametrize(("words", "nodes", "ranks"), [
    ("launch.nproc=4", 1, 4),
    ("launch.nproc=4 launch.nodes=3", 3, 12),
    ("launch.nproc=1", 1, 1),
    ("launch.nodes=2", 2, 16),
    ("launch.nproc=2 nodes=3", 3, 6),
    ("launch=node", 1, 8),
    ("experiment=deepseek_v2_32_mi355x moe.dispatcher=alltoall", 4, 32),
])  # fmt: skip
def test_nodes_and_their_gpus_are_those_of_a_run(words, nodes, ranks, document):
    found = document("hardware=mi355x", *words.split())
    assert (found["nodes"], found["num_ranks"], len(found["memory_gb_per_rank"])) == (nodes, ranks, ranks)


def test_a_rank_near_the_limit_fits_with_a_warning(tmp_path, document):
    words = f"{CHART} hardware=mi300x parallel.pp=16 parallel.ep=4 parallel.cp=2 parallel.cp_method=ring"
    words += " pipeline.schedule=interleaved pipeline.virtual_stages=6 recompute.ops=[layernorm]"
    page = tmp_path / "near.html"
    found = document(*words.split(), f"page={page}")
    assert found["fits"] and not found["fits_with_margin"]
    assert found["left_gb"] == pytest.approx(192 - found["memory_gb"]["total"]) and found["left_gb"] < 9.6
    said = f"{found['left_gb']:,.1f} GB to spare. [bold]Near the limit: less than 9.6 GB are left, 5% of"
    assert said in verdict(found)
    text = page.read_text()
    assert "GB left, near the limit" in text and all(reason in text for reason in found["not_counted"][1:])


def test_what_does_not_fit_gets_layouts_that_can_run(document):
    words = ("model=moe_1t", "train.micro_batch_size=1", "hardware=mi300x", "nodes=1")
    assert document(*words)["larger"] == {f"parallel.{axis}": 2 for axis in ("ep", "pp", "tp", "cp")}
    found = document(*words, "parallel.ep=8")  # which is all ranks, so a stage of fewer has no room for it
    assert not found["fits"] and found["larger"] == {"parallel.tp": 2, "parallel.cp": 2}
    alone = document("model=qwen3_8b", "hardware=h100", "gpus_per_node=1", "train.micro_batch_size=1")
    assert alone["larger"] == {} and verdict(alone).endswith("try more nodes or a card with more memory")


def test_a_dense_model_is_projected_without_words_about_experts(project):
    said = project("model=qwen3_0_6b", "hardware=h100", "nodes=1").out
    assert "ranks: pp 1 * dp 8" in said and re.findall(r"expert|moe|ep_overlap|exchange|\bep \d", said) == []


def misfit(kind: str, pp: int = 1, size: int = 1, *larger: str) -> str:
    memory = {**dict.fromkeys(MEMORY_KINDS, 1.0), kind: 100.0, "total": 150.0}
    shown = {"memory_gb": memory, "card_gb": 80, "worst_rank": 0, "fits": False, "layout": {"pp": pp}}
    shown |= {"micro_batch_size": size, "larger": dict.fromkeys(map("parallel.{}".format, larger), 2)}
    return verdict({**shown, "recompute_all": size == 2}).partition(": try ")[2]


def test_advice_is_what_there_is_to_change():
    every, small = ("ep", "pp", "tp", "cp"), "train.micro_batch_size=1 (it is 4)"
    cut = "recompute=all, parallel.cp=2"
    assert misfit("activations", 2, 1, *every) == f"{cut}, parallel.tp=2 or another pipeline.schedule"
    assert misfit("activations", 1, 4, *every) == f"{small}, {cut} or parallel.tp=2"
    assert misfit("activations", 1, 2, "ep") == "train.micro_batch_size=1 (it is 2)"
    assert misfit("buffers", 1, 4, *every) == f"{small} or parallel.cp=2"
    assert misfit("buffers", 2, 1, *every) == "parallel.cp=2"
    assert misfit("grads", 1, 4, *every) == "parallel.ep=2, parallel.pp=2 or parallel.tp=2"
    assert misfit("grads", 1, 4, "tp", "cp") == "parallel.tp=2"


WRONG = """
nodes=2 | hardware=... is required
hardwear=h200 | error: unknown key 'hardwear'; did you mean 'hardware'?
hardware=h100 serach=true | error: unknown key 'serach'; did you mean 'search'?
--hardwar mi355x | unknown key 'hardwar'; did you mean 'hardware'?
--hardwar=mi355x | unknown key 'hardwar'; did you mean 'hardware'?
modle=tiny | error: unknown key or group 'modle' on the command line ('modle=tiny')
hardware=mi30x | hardware=mi30x is not known; did you mean 'mi300x'?; use one of mi300x
hardware=a100 | error: hardware=a100 is not known; use one of mi300x, mi325x, mi355x, mi450, h100, h200
hardware=h100 nodes=0 | nodes=0 must be 1 or more
hardware=h100 nodes=2 launch.nodes=2 | launch.nodes=2 and nodes=2 are both given; leave one of the two out
hardware=h100 gpus_per_node=4 launch.nproc=8 | launch.nproc=8 and gpus_per_node=4 are both given; leave one
hardware=h100 gpus_per_node=0 | gpus_per_node=0 must be 1 or more
hardware=h100 launch.fake_world=8 | launch.fake_world=8: the number of ranks is launch.nodes times
hardware=h100 launch.nproc=4 parallel.pp=3 | parallel.pp=3 = 3 does not divide the 4 ranks
hardware=h100 parallel.pp=3 | parallel.pp=3 = 3 does not divide the 8 ranks
hardware=h100 assumptions=exakt | assumptions=exakt: expected one of exact, published
hardware=h100 compile.enabled=false | use compile.enabled=true
hardware=h100 assumptions=published parallel.tp=2 recompute=all | needs model.attention=gqa, not mla; needs
hardware=h100 assumptions=published parallel.tp=2 recompute=all | tp=1, not 2; needs recompute.all=False, not
hardware=h100 -m | -m: this tool takes one run; leave it out
hardware=h100 top=0 | top=0 must be 1 or more
hardware=h100 page=nowhere/x.html | page=nowhere/x.html: there is no folder nowhere
hardware=h100 search=true pipeline.microbatches=8 | use train.global_batch_size
hardware=h100 search=true assumptions=published | does not support assumptions=published
hardware=h100 search=true parallel.pp=3 | parallel.pp=3 = 3 does not divide the 8 ranks
hardware=h100 sweep=nodes | error: sweep=nodes: expected one of gpus
hardware=h100 sweep=gpus search=true | sweep=gpus does not support search=; leave one of the two out
hardware=h100 sweep=gpus page=a.html | sweep=gpus does not support page=; leave one of the two out
hardware=h100 sweep=gpus nodes=1 parallel.pp=3 | parallel.pp=3 = 3 does not divide the 8 ranks
"""


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_a_wrong_command_is_answered_with_what_to_type(line, project):
    words, message = line.split(" | ")
    result = project(*words.split())
    assert result.status == 2 and message in result.err, result.err
    assert "Traceback" not in result.err


def test_a_search_lists_layouts_and_draws_them(tmp_path, project):
    page = tmp_path / "search.html"
    words = (*SMALL, "search=true", "top=3", "parallel.tp=1", "train.global_batch_size=16")
    result = project(*words, f"page={page}")
    assert result.status == 0 and result.err.endswith(f"\nwrote {page}\n")
    assert re.search(r"^about [\d,]+ tokens/s/GPU, [\d.]+ GB: .*parallel\.pp=", result.err, flags=re.M)
    said = ("<h1>graphmoe: tiny on 8 H200, projected</h1>", "Recommended *", "*. ", "links between nodes are")
    said += ("Not counted in memory: the device", "What to type", "plotly", "card, 141 GB", "tokens/s/GPU")
    text = page.read_text()
    assert [each for each in said if each not in text] == [] and "tokens/s/GPU" in result.out
    assert "16 sequences of 128 tokens" in result.out  # typed, though it is a run's default
    command = result.out.splitlines()[-1]
    assert len(command) > 160 and command.startswith("python -m graphmoe.train ") and command in text
    assert text.count("<tr>") == 1 + 3 + 1  # and the best with parallel.ep=8
    words = ("model=moe_1t", "hardware=h100", "nodes=1", "train.micro_batch_size=1", "search=true")
    assert project(*words, f"page={page}").status == 0
    assert "Nothing fits 8 cards of 80 GB." in page.read_text()


def test_a_sweep_prints_a_row_for_each_number_of_gpus(project, document):
    words = ("hardware=h200", "data.seq_len=128", "parallel.pp=2", "parallel.ep=8", "sweep=gpus")
    found = document(*words)
    assert found["left_out"] == {"the layout needs a multiple of 16": [8]}
    counts = [row["num_ranks"] for row in found["rows"]]
    assert counts == [16 << n for n in range(9)]
    result = project(*words)
    lines = [line.split()[:3] for line in result.out.splitlines()]
    rows = [[f"{row['num_ranks']:,}", f"{row['nodes']:,}"] for row in found["rows"]]
    assert [line[:2] for line in lines if line[:2] in rows] == rows, result.err


def test_no_key_of_a_run_is_taken_for_a_misspelt_one_of_the_tool():
    keys = [*typing.get_type_hints(ProjectArgs)]
    check_words([f"{key}=x" for key in (*known_keys(), *(p.name for p in (ROOT / "conf").iterdir()))], keys)
    check_words(["moe_1t", "--hardware", "mi355x", "--train.steps=3", "nodes=96"], keys)


def test_help_of_the_command_names_the_keys_of_the_tool_and_of_a_run(project):
    result = project("--help")
    assert result.status == 0 and "hardware=" in result.out and "micro_batch_size" in result.out, result.err


DOCS = ROOT / "docs" / "projection.md"
TEXTS = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS, ROOT / "README.md"))
COMMANDS = [
    match.replace("\\\n", " ")
    for match in re.findall(r"^(?:\| `)?python -m graphmoe.project ((?:[^\n`\\]|\\\n)+)", TEXTS, flags=re.M)
]


@pytest.mark.slow
def test_commands_of_the_documentation_project_what_fits(tmp_path, document):
    """Searches and sweeps are left to their own tests, files of rates to those who measured them."""
    shown = [*COMMANDS, *(example.partition("graphmoe.project ")[2] for example in EXAMPLES)]
    shown = [words for words in shown if not re.search("search=|sweep=", words)]
    singles = {" ".join(words.replace("rates=rates.json", "").split()) for words in shown}
    assert len(singles) >= 5
    for words in sorted(singles):
        expected = "pipeline.virtual_stages=4" not in words  # the one that is said not to fit
        assert document(*shlex.split(words))["fits"] == expected, words
    assert (tmp_path / "moe_1t.html").is_file()


def sizes_of(layout: str) -> str:
    sizes = re.findall(r"(PP|EP|CP)(\d+)", layout)
    return " ".join(f"parallel.{name.lower()}={size}" for name, size in sizes)


@pytest.mark.parametrize("row", rows_below(DOCS, "| sequences of 4096"), ids=lambda row: row[0])
def test_the_chart_is_reproduced_and_what_runs_of_this_project_take_is_beside_it(row, document):
    virtual = 4 if "PP24" in row[0] else 2
    words = f"{CHART} hardware=mi300x pipeline.schedule=interleaved {sizes_of(row[0])}"
    words += f" pipeline.virtual_stages={virtual}"
    exact, chart = (document(*words.split(), f"assumptions={name}") for name in ("exact", "published"))
    memory = chart["memory_gb"]
    assert memory.pop("buffers") == 0
    cells = [*memory.values(), exact["memory_gb"]["total"]]
    assert [f"{cell:.1f}" for cell in cells] == row[1:]
    pp = chart["layout"]["pp"]
    assert chart["bubble"] == (pp - 1) / (pp - 1 + chart["micro_batches"] * virtual)


def layouts():
    rows = rows_below(DOCS, "| card | layout |")
    cards = itertools.accumulate((row[0] for row in rows), lambda card, cell: cell or card)
    return [(card, *row[1:]) for card, row in zip(cards, rows, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("row", layouts(), ids=lambda row: " ".join(row[:2]))
def test_a_row_of_the_table_of_a_search_is_projected(row, document):
    card, layout, schedule, memory, bubble, rate = row
    name, _, virtual_stages = schedule.replace("`", "").partition(", ")
    words = f"{CHART} hardware={card.lower()} {sizes_of(layout)} train.global_batch_size=3072"
    words += f" pipeline.schedule={name} pipeline.virtual_stages={virtual_stages or 'null'}"
    words += " parallel.cp_method=ring" * ("ring" in layout)
    words += " recompute.ops=[layernorm]" * ("norms again" in layout)
    words += " moe.dispatcher=symm" * ("symm" in layout)
    words += " graph.scope=full_iteration" * ("symm" in layout or "EP1" in layout)
    words += " moe.dispatcher=local" * ("parallel.ep=1" in words.split())
    found = document(*shlex.split(words))
    near = "" if found["fits_with_margin"] else ", near the limit"
    assert f"{found['memory_gb']['total']:.1f}{near}" == memory
    assert (f"{found['bubble']:.0%}", f"{found['tokens_per_s_per_gpu']:,.0f}") == (bubble, rate)
    assert not ("recommended" in layout and near)
