"""Words of a command line in the forms that people type, as Hydra reads them."""

import re

import pytest

from graphmoe.command.words import run_words
from graphmoe.config.schema import ConfigError
from tests.runs import hydra_config


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("--model deepseek_v3 --train.steps=20", ["model=deepseek_v3", "train.steps=20"]),
        ("--train.global-batch-size 8 optim.lr=1e-3", ["train.global_batch_size=8", "optim.lr=1e-3"]),
        ("--data.paths a.txt b.txt --data.shuffle --data.seed 3", None),
        ("--data.shuffle false --run.name x", ["data.shuffle=false", "run.name=x"]),
        ("--data.paths [a,b]", ["data.paths=[a,b]"]),
        ("--moe.receive_budget -1", None),
        ("deepseek_v3 format=json", ["model=deepseek_v3", "format=json"]),
        ("-m optim.lr=1e-3,2e-3", ["-m", "optim.lr=1e-3,2e-3"]),
        ("--cfg job train.steps=3", ["--cfg", "job", "train.steps=3"]),
        ("+debug=quick ~data.paths host=amd", ["debug=quick", "~data.paths", "host=amd"]),
        ("hydra/launcher=joblib --config-dir mine model=mine", None),
        ("-sc install=bash", ["-sc", "install=bash"]),
        ("--host.env.A b host.env.C=d +host.env.E=f", ["++host.env.A=b", "++host.env.C=d", "+host.env.E=f"]),
        ("host.env={A:b} ~host.env.A", ["++host.env={A:b}", "~host.env.A"]),
    ],
)
def test_each_form_is_an_override(typed, read):
    special = {
        "--data.paths": ["data.paths=[a.txt,b.txt]", "data.shuffle=true", "data.seed=3"],
        "--moe.receive_budget": ["moe.receive_budget=-1"],
        "hydra/launcher=joblib": ["--config-dir", "mine", "hydra/launcher=joblib", "model=mine"],
    }
    assert run_words(typed.split()) == (read or special[typed.split()[0]])


def test_keys_of_a_tool_stand_among_those_of_a_run():
    more = {"hardware": str, "search": bool}
    words = run_words(["moe_1t", "--hardware", "mi355x", "--search", "--train.steps", "3"], more)
    assert words == ["model=moe_1t", "hardware=mi355x", "search=true", "train.steps=3"]


def test_a_list_of_names_with_blanks_and_quotes_reaches_the_configuration():
    names = ["a b.txt", "it's,c.txt", "corpus/*.jsonl"]
    words = run_words(["--data.paths", *names, "--data.text_field", "body"])
    assert list(hydra_config(*words, with_hydra=False).data.paths) == names


def test_names_of_an_open_mapping_need_no_plus():
    words = run_words(["--host.env.NCCL_DEBUG", "INFO", "host.env.A=b", "host.env={C:d}"])
    assert dict(hydra_config(*words, with_hydra=False).host.env) == {"NCCL_DEBUG": "INFO", "A": "b", "C": "d"}
    with pytest.raises(ConfigError, match=r"unknown key 'host.envs.A'"):
        run_words(["host.envs.A=b"])


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--train.steps", "--train.steps needs a value: train.steps=..."),
        ("--train.steps --optim.lr 3", "--train.steps needs a value"),
        ("train.steps 30", "'train.steps' is not of the form key=value"),
        ("-s 3", "'-s' is not of the form key=value"),
        ("--train.stps 3", "did you mean 'train.steps'?"),
        ("--steps 3", "did you mean 'train.steps'?"),
        ("--optm.lr=3", "unknown key 'optm.lr'"),
        ("deepseek_v9", "there is no model 'deepseek_v9'; did you mean model=deepseek_v3?"),
        ("train.steps=abc", "train.steps on the command line: Value 'abc'"),
        ("--data.source nowhere", "data.source=nowhere: there is no such choice; use one of stdlib"),
        ("data.paths=a", "a list is wanted"),
    ],
)
def test_a_wrong_word_is_one_line_before_anything_is_composed(typed, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        run_words(typed.split())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "typed",
    [
        "train.steps=${train.seed}",
        "-m train.steps=1,2",
        "model=mine --config-dir mine",
        "+mine=x hydra.searchpath=[file:///mine]",
        "+host.env.NCCL_DEBUG=INFO",
        "~debug",
        "hydra.run.dir=x",
        "launch.nproc=auto",
        "model.attention=package.module:Name",
    ],
)
def test_what_only_hydra_can_judge_is_left_to_it(typed):
    assert sorted(run_words(typed.split())) == sorted(typed.split())
