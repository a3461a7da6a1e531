"""Words of a command line in the forms that people type, as Hydra reads them."""

import json
import re
import shutil
from dataclasses import replace

import pytest

from graphmoe import save_hf
from graphmoe.command.hydra import read_words, to_config
from graphmoe.command.words import run_words
from graphmoe.config.schema import ConfigError
from graphmoe.convert import ConvertArgs, convert
from graphmoe.run.weights import tuned
from tests.command.test_convert import CONFIG, random_model
from tests.runs import hydra_config

FORMS = {
    "--model deepseek_v3 --train.steps=20": ["model=deepseek_v3", "train.steps=20"],
    "--train.global-batch-size 8 optim.lr=1e-3": ["train.global_batch_size=8", "optim.lr=1e-3"],
    "--data.paths a.txt b.txt --data.shuffle": ["data.paths=[a.txt,b.txt]", "data.shuffle=true"],
    "--data.shuffle --data.seed 3": ["data.shuffle=true", "data.seed=3"],
    "--data.shuffle false --run.name x": ["data.shuffle=false", "run.name=x"],
    "--data.paths [a,b] --moe.receive_budget -1": ["data.paths=[a,b]", "moe.receive_budget=-1"],
    "deepseek_v3 format=json": ["model=deepseek_v3", "format=json"],
    "-m optim.lr=1e-3,2e-3": ["-m", "optim.lr=1e-3,2e-3"],
    "--cfg job train.steps=3": ["--cfg", "job", "train.steps=3"],
    "+debug=quick ~data.paths host=amd": ["debug=quick", "~data.paths", "host=amd"],
    "model=mine --config-dir mine": ["--config-dir", "mine", "model=mine"],
    "-sc install=bash": ["-sc", "install=bash"],
    "--host.env.A b host.env.C=d +host.env.E=f": ["++host.env.A=b", "++host.env.C=d", "+host.env.E=f"],
    "host.env={A:b} ~host.env.A": ["++host.env={A:b}", "~host.env.A"],
    "moe_1t --hardware mi355x --search": ["model=moe_1t", "hardware=mi355x", "search=true"],
}
FOR_HYDRA = ("train.steps=${train.seed}", "-m train.steps=1,2", "hydra.run.dir=x", "launch.nproc=auto")
FOR_HYDRA += ("hydra.searchpath=[file:///mine] +mine=x", "~debug", "model.attention=package.module:Name")
FOR_HYDRA += ("hydra/launcher=joblib",)
"""What only Hydra can judge."""


def test_each_form_is_an_override():
    forms = FORMS | {typed: typed.split() for typed in FOR_HYDRA}
    more = {"hardware": str, "search": bool}  # keys of a tool
    assert {typed: run_words(typed.split(), more) for typed in forms} == forms


def test_a_list_of_names_with_blanks_and_quotes_reaches_the_configuration():
    names = ["a b.txt", "it's,c.txt", "corpus/*.jsonl"]
    words = run_words(["--data.paths", *names, "--data.text_field", "body"])
    assert list(hydra_config(*words, with_hydra=False).data.paths) == names


@pytest.fixture
def folder(tmp_path):
    save_hf(random_model(), CONFIG, tmp_path / "hf")
    (tmp_path / "shape").mkdir()
    shutil.copy(tmp_path / "hf" / "config.json", tmp_path / "shape")
    return tmp_path / "hf"


def composed_of(*words):
    config = to_config(hydra_config(*read_words([*words, "data=synthetic"]), with_hydra=False))
    return config.model, config.checkpoint.init_from


def test_a_folder_gives_model_and_weights(folder, monkeypatch):
    untuned = replace(CONFIG, name="hf", hf_family="deepseek_v3")
    taken = tuned(untuned)
    monkeypatch.chdir(folder.parent)
    for word in (f"model={folder}", f"--model={folder}/", f"{folder}", f"checkpoint.init_from={folder}"):
        assert composed_of(word) == (taken, str(folder)), word
    assert composed_of("model=hf/") == composed_of("model=./hf") == (taken, "hf")
    assert composed_of("model=shape", "model.top_k=1") == (replace(untuned, name="shape", top_k=1), None)
    assert composed_of("model=hf", "checkpoint.init_from=null") == (untuned, None)
    assert composed_of("model=hf", "checkpoint.init_from=shape") == (taken, "shape")
    assert composed_of("model=hf", "checkpoint.resume_from=elsewhere") == (taken, None)
    assert composed_of("model=tiny", "checkpoint.init_from=hf")[0].name == "tiny"
    words = read_words(["-m", "model=hf/,./shape/,tiny", "train.steps=1"])
    assert words == ["-m", "model=hf,./shape,tiny", "train.steps=1"]
    words = read_words(["-m", "checkpoint.init_from=hf,./hf", "train.steps=1"])
    assert words == ["-m", "train.steps=1", "model=hf,./hf"]
    assert [composed_of(word)[1] for word in ("model=hf", "model=./hf")] == ["hf", "hf"]
    assert composed_of("model=./shape") == (replace(untuned, name="shape"), None)


def test_a_folder_sets_no_other_keys_and_names_no_code(folder, tmp_path):
    path = folder / "config.json"
    hostile = {"train": {"steps": 9}, "auto_map": {"AutoConfig": "a.b"}, "attention": "os:x", "name": "${x}"}
    path.write_text(json.dumps(json.loads(path.read_text()) | hostile))
    folder.rename(tmp_path / "a $b")
    assert composed_of(f"model='{tmp_path}/a $b/'")[0] == tuned(
        replace(CONFIG, name="a-b", hf_family="deepseek_v3")
    )
    convert(ConvertArgs(from_=tmp_path / "a $b", to=tmp_path / "own"))
    (option,) = (tmp_path / "own" / "model").iterdir()
    plain = option.read_text()
    for line, said in (("attention: os:x", "code outside the package"), ("name: ${x}", "would be looked up")):
        option.write_text(re.sub(rf"^{line.split()[0]} .*", line, plain, flags=re.MULTILINE))
        with pytest.raises(ConfigError, match=rf"^model={tmp_path}/own: .*{said}") as error:
            composed_of(f"model={tmp_path}/own")
        assert "\n" not in str(error.value)


WRONG = {
    "--train.steps": "--train.steps needs a value: train.steps=...",
    "--train.steps --optim.lr 3": "--train.steps needs a value",
    "train.steps 30": "'train.steps' is not of the form key=value",
    "-s 3": "'-s' is not of the form key=value",
    "--train.stps 3": "did you mean 'train.steps'?",
    "--steps 3": "did you mean 'train.steps'?",
    "--optm.lr=3": "unknown key 'optm.lr'",
    "host.envs.A=b": "unknown key 'host.envs.A'",
    "deepseek_v9": "there is no model 'deepseek_v9'; did you mean model=deepseek_v3?",
    "--data.source nowhere": "data.source=nowhere: there is no such choice; use one of stdlib",
    "model.attention_backend=f": "expected one of [auto, sdpa, padded_flash (on a GPU), flash4 (on a GPU)",
    "--moe.experts tee": "use one of auto, torch, triton (on a GPU), turbo (on a GPU), te (on a GPU), or",
    "model=no/where": "there is no folder 'no/where'; give a folder with config.json, or one of deep",
    "model=./empt": "there is no folder './empt'; did you mean empty?",
    "model=empty": "model=empty: empty holds no weights; give a Hugging Face folder",
    "checkpoint.init_from=empty": "checkpoint.init_from=empty: empty holds no weights",
    "model=" + 300 * "a/": "there is no folder 'a/a/",
    "model=damaged": "model=damaged: damaged/config.json is not JSON",
    "mine.yaml": "a model is a preset or a folder; --config-dir DIR experiment=mine reads it",
    "./text.txt": "./text.txt is a file, and a model is a preset or a folder; text is read by",
    "-m model=tiny,damaged": "model=damaged: damaged/config.json is not JSON",
}


def test_a_wrong_word_is_one_line_before_anything_is_composed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "damaged"):
        (tmp_path / name).mkdir()
    for name in ("damaged/config.json", "mine.yaml", "text.txt"):
        (tmp_path / name).write_text("{")
    for typed, said in WRONG.items():
        with pytest.raises(ConfigError, match=re.escape(said)) as error:
            read_words(typed.split())
        assert "\n" not in str(error.value)
