"""Commands in the documentation of projections find what the documentation says."""

import itertools
import json
import re
import shlex

import pytest

from graphmoe.project.__main__ import EXAMPLES
from tests.runs import ROOT
from tests.test_docs import rows_below

PAGE = ROOT / "docs" / "projection.md"
CHART = "model=moe_1t train.micro_batch_size=1 nodes=96"
TEXTS = "\n".join(path.read_text(encoding="utf-8") for path in (PAGE, ROOT / "README.md"))
COMMANDS = [
    match.replace("\\\n", " ")
    for match in re.findall(r"^(?:\| `)?python -m graphmoe.project ((?:[^\n`\\]|\\\n)+)", TEXTS, flags=re.M)
]


@pytest.fixture
def projected(project):
    """Make the document of a command of the tool."""

    def projected(words: str):
        result = project(*shlex.split(words), "format=json")
        assert result.status == 0, result.err
        return json.loads(result.out)

    return projected


@pytest.mark.slow
def test_commands_of_the_documentation_project_what_fits(tmp_path, projected):
    """Searches are left to their own tests, files of rates to those who measured them."""
    shown = [*COMMANDS, *(example.partition("graphmoe.project ")[2] for example in EXAMPLES)]
    singles = {
        " ".join(words.replace("rates=rates.json", "").split()) for words in shown if "search=" not in words
    }
    assert len(singles) >= 5
    for words in sorted(singles):
        expected = "pipeline.virtual_stages" not in words  # the one that is said not to fit
        assert projected(words)["fits"] == expected, words
    assert (tmp_path / "moe_1t.html").is_file()


def sizes_of(layout: str) -> str:
    """Words for such as PP24 EP8 CP2."""
    return " ".join(
        f"parallel.{name.lower()}={size}" for name, size in re.findall(r"(PP|EP|CP)(\d+)", layout)
    )


@pytest.mark.parametrize("row", rows_below(PAGE, "| sequences of 4096"), ids=lambda row: row[0])
def test_the_chart_is_reproduced_and_what_runs_of_this_project_take_is_beside_it(row, projected):
    virtual = 4 if "PP24" in row[0] else 2
    words = f"{CHART} hardware=mi300x pipeline.schedule=interleaved {sizes_of(row[0])}"
    words += f" pipeline.virtual_stages={virtual}"
    exact, chart = (projected(f"{words} assumptions={name}") for name in ("exact", "published"))
    memory = chart["memory_gb"]
    assert memory.pop("buffers") == 0
    cells = [*memory.values(), exact["memory_gb"]["total"]]
    assert [f"{cell:.1f}" for cell in cells] == row[1:]
    pp = chart["layout"]["pp"]
    assert chart["bubble"] == (pp - 1) / (pp - 1 + chart["micro_batches"] * virtual)


def layouts():
    """Rows of the table of a search, each with its card."""
    rows = rows_below(PAGE, "| card | layout |")
    cards = itertools.accumulate((row[0] for row in rows), lambda card, cell: cell or card)
    return [(card, *row[1:]) for card, row in zip(cards, rows, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("row", layouts(), ids=lambda row: " ".join(row[:2]))
def test_a_row_of_the_table_of_a_search_is_projected(row, projected):
    card, layout, schedule, memory, bubble, rate = row
    name, _, virtual_stages = schedule.replace("`", "").partition(", ")
    words = f"{CHART} hardware={card.lower()} {sizes_of(layout)} train.global_batch_size=3072"
    words += f" pipeline.schedule={name} pipeline.virtual_stages={virtual_stages or 'null'}"
    words += " parallel.cp_method=ring" * ("ring" in layout)
    words += " recompute.ops=[layernorm]" * ("norms again" in layout)
    found = projected(words)
    near = "" if found["fits_with_margin"] else ", near the limit"
    assert f"{found['memory_gb']['total']:.1f}{near}" == memory
    assert (f"{found['bubble']:.0%}", f"{found['tokens_per_s_per_gpu']:,.0f}") == (bubble, rate)
    assert not ("recommended" in layout and near)
