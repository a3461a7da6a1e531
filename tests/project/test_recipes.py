"""Recipes of conf/experiment for many GPUs: each fits its cards, and is projected to what its file says."""

import functools
import re
import shlex

import pytest
from omegaconf import open_dict

from graphmoe.command.errors import with_plain_groups
from graphmoe.command.hydra import to_config
from graphmoe.plan.costs.hardware import CARDS, GPUS_PER_NODE
from graphmoe.project.arguments import ProjectArgs, completed
from graphmoe.project.document import project
from tests.runs import ROOT, hydra_config
from tests.test_docs import rows_below

FOR_CARDS = re.compile(rf".*_(\d+)_({'|'.join(CARDS)})")
RECIPES = [path for path in sorted((ROOT / "conf/experiment").glob("*.yaml")) if FOR_CARDS.match(path.stem)]


def configured(*words: str, complete=None):
    cfg = hydra_config(*words)
    with open_dict(cfg):
        del cfg["hydra"]
    return to_config(cfg, complete=complete)


def projected(args: ProjectArgs, *words: str):
    return project(configured(*words, complete=functools.partial(completed, args=args)), args)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_its_cards_with_a_margin_and_is_projected_to_what_it_says(path):
    found = FOR_CARDS.fullmatch(path.stem)
    assert found
    per_node = min(int(found[1]), GPUS_PER_NODE)
    args = ProjectArgs(found[2], nodes=int(found[1]) // per_node, gpus_per_node=per_node)
    words = f"experiment={path.stem}"
    recipe = configured(words)
    launch = recipe.launch
    assert (launch.nproc, 1 if launch.nodes == "auto" else launch.nodes) == (per_node, args.nodes)
    said = re.search(r"^# Projected: (.*), from ", path.read_text(), flags=re.M)
    if recipe.moe.dispatcher == "turbo":
        assert recipe.moe.sync_free_stage == 1 and recipe.graph.scope == "none"
    else:
        assert recipe.graph.scope == "full_iteration"
        assert recipe.pipeline.ep_overlap or per_node < GPUS_PER_NODE
    document = projected(args, words)
    assert document["fits_with_margin"] and document["left_gb"] >= 0.05 * args.card.memory_gb
    total, rate = document["memory_gb"]["total"], document["tokens_per_s_per_gpu"]
    shown = f"{total:.1f} GB of {args.card.memory_gb:.0f}, {rate:,.0f} tokens/s of each GPU"
    assert said and said[1] == shown


def test_there_is_a_recipe_for_each_published_run():
    assert len([path for path in RECIPES if not path.stem.startswith(("finetune_", "lora_"))]) == 11


@pytest.mark.parametrize(
    "row", rows_below(ROOT / "docs/projection.md", "| recipe | published layout |"), ids=lambda row: row[0]
)
def test_a_published_layout_fits_its_cards_with_a_margin(row):
    recipe, layout, words, *said = (cell.strip("`") for cell in row)
    num_ranks, card = FOR_CARDS.fullmatch(recipe).groups()
    args = ProjectArgs(card, nodes=int(num_ranks) // GPUS_PER_NODE)
    document = projected(args, f"experiment={recipe}", *words.split())
    assert " ".join(f"{axis.upper()}{document['layout'][axis]}" for axis in ("pp", "ep", "cp")) == layout
    assert document["fits_with_margin"] and document["left_gb"] >= 0.05 * args.card.memory_gb
    rate = f"{document['tokens_per_s_per_gpu']:,.0f}"
    assert [f"{document['memory_gb']['total']:.1f}", rate] == said


@pytest.mark.parametrize(
    "word",
    ["+experiment=sweep/learning_rate", "experiment/sweep=learning_rate", "+experiment/sweep=learning_rate"],
)
def test_an_experiment_is_chosen_however_its_group_is_typed(word):
    words = with_plain_groups([word, "+model=tiny_gqa", "+host.env.A=b", "hydra/launcher=joblib", "-m"])
    kept = ["model=tiny_gqa", "+host.env.A=b", "hydra/launcher=joblib", "-m"]
    assert words == ["experiment=sweep/learning_rate", *kept]
    assert configured(*words[:2]).run.name == "learning_rate"


@pytest.mark.parametrize(
    "row", rows_below(ROOT / "docs/tuning.md", "| step | words |"), ids=lambda row: row[0]
)
def test_the_case_of_the_guide_is_projected(row):
    words = row[1].strip("`").split()
    document = projected(ProjectArgs("h100"), "model=deepseek_v2_lite", "train.global_batch_size=256", *words)
    rate = f"{document['tokens_per_s_per_gpu']:,.0f}" if document["fits"] else "does not fit"
    assert [f"{document['memory_gb']['total']:.1f}", f"{document['left_gb']:.1f}", rate] == row[2:]


def test_the_layout_that_the_page_on_dry_runs_quotes_is_projected_to_what_it_says():
    text = (ROOT / "docs/projection.md").read_text(encoding="utf-8").partition("### What a search found")[2]
    said = re.search(r"(\S+) GB of 80 and (\S+) tokens/s", text)
    quoted = re.search(r"^python -m graphmoe.train (.*?)\n```", text, flags=re.M | re.S)
    assert said and quoted
    words = [word for word in shlex.split(quoted[1].replace("\\\n", " ")) if not word.startswith("launch.")]
    document = projected(ProjectArgs("h100", nodes=32), *words, "train.global_batch_size=4096")
    assert document["fits_with_margin"]
    rate = f"{document['tokens_per_s_per_gpu']:,.0f}"
    assert (f"{document['memory_gb']['total']:.1f}", rate) == said.groups()
    assert f"{document['buffers_gb']['communication']:.1f} GB of buffers of communicators" in text
