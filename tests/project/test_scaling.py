"""A layout on doubling numbers of GPUs: its rows, those of the documentation, and published ones."""

import re
import shlex
from dataclasses import replace

import pytest

from graphmoe.project.arguments import Assumptions, ProjectArgs, Sweep, check, completed, fixed_keys
from graphmoe.project.document import MOST_GPUS, scaled, shares_of
from graphmoe.project.tables import render_scaled, scaled_cells
from tests.project.test_recipes import configured, projected
from tests.runs import ROOT, text_of
from tests.test_docs import rows_below

SMALL = ("model=tiny", "data.seq_len=128", "parallel.pp=2", "parallel.ep=2")
PAGE = ROOT / "docs/projection.md"
TEXT = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
COMMANDS = re.findall(r"^python -m graphmoe\.project (.*) sweep=gpus$", TEXT, flags=re.M)
ERROR = 0.1


def scaled_by(args: ProjectArgs, *words: str):
    args = replace(args, sweep=Sweep.gpus)
    check(args, words)
    return scaled(
        configured(*words, complete=lambda config: completed(config, args, fixed_keys(words))), args
    )


def typed(command: str, **more):
    """The tool's arguments and the words of the run, of a line of the documentation."""
    given = dict(word.split("=") for word in shlex.split(command))
    hardware, nodes = given.pop("hardware"), given.pop("nodes", None)
    words = [f"{key}={value}" for key, value in given.items()]
    return ProjectArgs(hardware, nodes=nodes and int(nodes), **more), *words


def test_each_row_is_the_projection_of_its_gpus_with_the_same_micro_batches():
    found = scaled_by(ProjectArgs("mi300x"), *SMALL, "parallel.dp=4", "pipeline.microbatches=6")
    rows = found["rows"]
    assert [row["num_ranks"] for row in rows] == [8 << n for n in range(10)] and MOST_GPUS == 8 << 9
    for row in (rows[0], rows[3]):
        words = (*SMALL, "pipeline.microbatches=6")
        alone = projected(ProjectArgs("mi300x", nodes=row["nodes"]), *words)
        assert {key: alone[key] for key in row if key in alone} == {k: row[k] for k in row if k in alone}
        assert alone["micro_batches"] == found["micro_batches"] == 6
        assert row["shares"] == shares_of(alone) and sum(row["shares"].values()) == pytest.approx(1)
        rate = rows[0]["tokens_per_s_per_gpu"]
        assert row["efficiency"] == row["tokens_per_s_per_gpu"] / rate


def test_numbers_of_gpus_that_a_layout_cannot_have_are_left_out_with_a_reason():
    words = ("parallel.pp=3", "parallel.ep=4", "model.num_layers=6")
    found = scaled_by(ProjectArgs("h200", gpus_per_node=2), "model=tiny", *words, "data.seq_len=128")
    assert found["nodes"] == 6 and found["left_out"] == {"the layout needs a multiple of 12": [6]}
    assert [row["num_ranks"] for row in found["rows"]] == [12 << n for n in range(9)]
    shown = text_of(render_scaled(found), width=200)
    assert "pp3 ep4: 12 micro-batches of 4 on each data-parallel rank;" in shown
    assert "left out, in GPUs: 6 (the layout needs a multiple of 12)" in shown
    words = ("parallel.dp_shard=fsdp2", "parallel.dp_shard_size=16", "nodes=4")
    found = scaled_by(ProjectArgs("h200", nodes=4), "model=tiny", *words[:2], "data.seq_len=128")
    (reason,) = found["left_out"]
    assert reason.startswith("parallel.dp_shard_size=16") and found["left_out"][reason] == [8]


def test_efficiency_is_of_the_fewest_gpus_that_have_the_memory():
    found = scaled_by(*typed("experiment=deepseek_v3_512_mi325x hardware=mi325x nodes=64"))
    rows = {row["num_ranks"]: row for row in found["rows"]}
    assert not rows[256]["fits"] and rows[256]["efficiency"] is None and rows[512]["efficiency"] == 1
    assert (rows[256]["bound_by"], rows[512]["bound_by"]) == ("memory", "compute")
    assert scaled_cells(rows[256])[3::5] == ["-", "memory"]
    shown = text_of(render_scaled(found), width=200)
    assert "memory: not enough, the card has 256 GB" in shown


def rows_of_page():
    """Rows of the table by model; a model's name stands in its first row."""
    found: dict[str, list[list[str]]] = {}
    for name, *cells in rows_below(PAGE, "| model, card | GPUs |"):
        name = name.partition(",")[0].strip("`") or [*found][-1]
        found.setdefault(name, []).append(cells)
    return found


@pytest.mark.parametrize(
    "command",
    [pytest.param(line, marks=[pytest.mark.slow] * ("scout" not in line)) for line in COMMANDS],
    ids=lambda command: re.search(r"model=(\w+)|experiment=(\w+)", command)[0],
)
def test_rows_of_the_page_are_what_the_command_prints_and_near_published_ones(command):
    found = scaled_by(*typed(command))
    expected = rows_of_page()[found["model"]]
    printed = [scaled_cells(row) for row in found["rows"]]
    assert [[row[n] for n in (0, 2, 3, 5, 7)] for row in printed] == [row[:5] for row in expected]
    for row in expected:
        for share in re.findall(r"(\d+)%", row[5]):
            assert float(row[2].rstrip("%")) == pytest.approx(int(share), rel=ERROR)


def test_the_page_has_the_five_models_and_the_published_efficiencies():
    assert len(COMMANDS) == 5 == len(rows_of_page())
    said = {(name, row[0]): row[5] for name, rows in rows_of_page().items() for row in rows if row[5]}
    assert {key: re.findall(r"\d+%", text) for key, text in said.items()} == {
        ("deepseek_v3", "128"): ["100%"],
        ("deepseek_v3", "512"): ["97%"],
        ("deepseek_v3", "1,024"): ["96%"],
        ("llama4_scout", "32"): ["100%"],
        ("llama4_scout", "512"): ["102%"],
    }


BUBBLES = "model=moe_515b experiment=moe_1t_768_mi300x nodes=64 hardware=mi325x parallel.pp=16 parallel.cp=1"
BUBBLES += " train.global_batch_size=512"
"""16 micro-batches of each data-parallel rank."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "by_formula", "measured", "simulated"),
    [(1, 48.43, 54.4, 52.2), (3, 23.8, 24.4, 33.1), (6, 13.51, 14.5, 28.2)],
)
def test_published_bubbles_are_those_of_the_formula_and_near_the_simulation(
    stages, by_formula, measured, simulated
):
    schedule = "interleaved" if stages > 1 else "1f1b pipeline.virtual_stages=null"
    args, *run = typed(f"{BUBBLES} pipeline.virtual_stages={stages} pipeline.schedule={schedule}")
    both = (replace(args, assumptions=kind) for kind in (Assumptions.published, Assumptions.exact))
    bubbles = [projected(each, *run)["bubble"] for each in both]
    assert 100 * bubbles[0] == pytest.approx(by_formula, rel=0.002)
    assert f"{bubbles[1]:.1%}" == f"{simulated}%" and f"| {measured}% | {simulated}% |" in TEXT


@pytest.mark.slow
def test_the_gain_of_fp8_is_what_the_page_says():
    (command,) = (line for line in COMMANDS if "fp8" in line)
    args, *words = typed(command)
    kinds = "precision.fp8_products=[experts]", "precision.fp8=none"
    rates = [projected(replace(args, nodes=64), *words, kind)["tokens_per_s_per_gpu"] for kind in kinds]
    assert f"| +28% | +{rates[0] / rates[1] - 1:.0%} |" in TEXT
