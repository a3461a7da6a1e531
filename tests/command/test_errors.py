"""Errors of the configuration: one message that names the key, its place and the nearest valid one."""

import json
import re
import subprocess
import sys

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from graphmoe.command.errors import ANSWERS, explain, known_keys, nearest_key, wrong_words
from graphmoe.command.hydra import to_config
from graphmoe.plan.pipeline.schedules import SCHEDULES
from tests.runs import command, hydra_config


def message_of(word: str) -> str:
    with pytest.raises(Exception) as caught:
        to_config(hydra_config(word, with_hydra=False))
    return explain(caught.value, [word])


CASES = {
    "+model.typo=5": "unknown key 'model.typo' on the command line ('+model.typo=5')",
    "++model.top_kk=5": "did you mean 'model.top_k'?",
    "model.num_layers.x=5": "did you mean 'model.num_layers'?",
    "+optm.lr=1": "did you mean 'optim.lr'?",
    "modle=tiny": "unknown key or group 'modle' on the command line ('modle=tiny'); did you mean 'model'?",
    "learning_rate=1": "unknown key or group 'learning_rate' on the command line",
    "model=tinny": "there is no model 'tinny'; did you mean model=tiny? (options: ",
    "+debug=quik": "there is no debug 'quik'; did you mean debug=quick?",
    "optim.lr=abc": "optim.lr on the command line: Value 'abc' of type 'str' could not be converted",
    "train.steps=1.5": "train.steps on the command line: Value '1.5' of type 'float'",
    "train.steps=null": "train.steps on the command line: field 'train.steps' is not Optional",
    "data.paths=a": "a list is wanted; type it in brackets and quotes: 'data.paths=[a,b]'",
    "model.rope_scaling=ntk": "rope_scaling on the command line: Invalid value 'ntk', expected one of [",
    "format=xml": "format on the command line: Invalid value 'xml', expected one of [text, json]",
    "optim.lr=${nope}": "optim.lr on the command line: Interpolation key 'nope' not found",
    "~model.top_k": "model.top_k on the command line",
    "hydra.run.dri=x": "hydra.run.dri on the command line: Key 'dri' not in 'RunDir'",
    "data.paths=[a": "[a",
    "optim=null": "there is no optim 'null'",
    "optim=my:lion": "is the value of a key: optim.name=my:lion or optim.schedule=my:lion",
    "data=my:Mine": "is the value of a key: data.source=my:Mine",
    "model=[tiny,3]": "there is no model '3'",
    f"optim.lr={10**400}": "optim.lr on the command line: int too large to convert to float",
    "hydra/launcher=3": "hydra/launcher=3 cannot be used: Config group override must be a string",
}


def test_the_message_names_the_word_and_what_to_type():
    for word, part in CASES.items():
        found = message_of(word)
        assert part in found and "Traceback" not in found, word


def test_a_value_that_needs_quotes_of_its_own_is_named_with_them():
    needed = {
        "pipeline.layout=Et|(tt|)*6L": "pipeline.layout='Et|(tt|)*6L'",
        "run.name==5": "run.name='=5'",
        "train.steps=[1": "train.steps='[1'",
        "run.name=it's(": "run.name='it\\'s('",
    }
    for word, typed in needed.items():
        said = message_of(word)
        assert said.startswith(f"{word} on the command line") and f'"{typed}"' in said and "\n" not in said
        OverridesParser.create().parse_override(typed)


OPTIONS = {
    "model=petit": "'model=petit' on the command line: there is no model 'petit'; did you mean model=p",
    "experiment=mni": "there is no experiment 'mni'; did you mean experiment=mini?",
    "experiment=sweep/grap": "no experiment 'sweep/grap'; did you mean experiment=sweep/graph_scope?",
    "experiment=bad": "in a list of defaults: there is no model 'petits'; did you mean model=petite?",
    "experiment=local": "experiment/local.yaml: its first line must be '# @package _global_'",
    "experiment=mini data=fles": "there is no data 'fles'; did you mean data=files?",
    "+mine=z": "'+mine=z' on the command line: there is no mine 'z'; did you mean mine=y? (options: y)",
    "model=null": "'model=null' on the command line: there is no model 'null'",
    "hydra/launcher=slrm": "did you mean hydra/launcher=slurm?",
    "model=typo": "key 'model.hiden_size' in model/typo.yaml; did you mean 'model.hidden_size'?",
    "model=many": "model.num_layers in model/many.yaml: Value 'many'",
    "model=open": "open.yaml",
}


def test_a_wrong_option_or_file_of_the_users_own_is_named(tmp_path):
    override = "# @package _global_\ndefaults:\n  - override /model: petit"
    files = {"model/petite": "", "mine/y": "", "experiment/local": "train:\n  steps: 3"}
    files |= {"model/typo": "hiden_size: 3", "model/many": "num_layers: many", "model/open": "num_layers: ["}
    files |= {"experiment/mini": f"{override}e", "experiment/bad": f"{override}s"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    own = f"hydra.searchpath=['file://{tmp_path}']"
    for words, said in OPTIONS.items():
        with pytest.raises(Exception) as caught:
            to_config(hydra_config(own, *words.split(), with_hydra=False))
        found = explain(caught.value, ["--config-dir", str(tmp_path), *words.split()])
        assert said in found and ("\n" not in found or words == "model=open"), words  # YAML's own lines
    run = command(tmp_path, "--config-dir", ".", "model=many")
    assert run.wait() == 2 and run.err.read_text().startswith("error: ")
    assert OPTIONS["model=many"] in run.err.read_text() and "Traceback" not in run.err.read_text()


NEAREST = {
    "lr": "optim.lr", "optim.learning_rate": "optim.lr", "train.max_steps": "train.steps",
    "model.seq_len": "data.seq_len", "train.num_layers": "model.num_layers",
    "train.global_batch_sie": "train.global_batch_size", "checkpont.keep_last": "checkpoint.keep_last",
}  # fmt: skip


def test_the_nearest_key_is_found_by_its_letters_its_last_word_and_by_what_others_call_it():
    keys = [key for key in known_keys() if "." in key]
    wanted = dict(zip(keys, keys, strict=True)) | NEAREST  # every key is its own nearest
    assert len(keys) > 90 and {typed: nearest_key(typed) for typed in wanted} == wanted


@pytest.mark.parametrize(
    "word", ["run.name=../precious", "run.name=a/b/c", "hydra.run.dir=x/y", "hydra.run.dir="]
)
def test_a_refused_run_makes_no_folder_and_deletes_none(tmp_path, word):
    here = tmp_path / "here"
    for name in ("precious", "outputs"):
        (here / name).mkdir(parents=True)
    run = command(here, word, "train.steps=0", "model.top_k=99", "optim.lr=${model.num_layers}")
    first, *lines = run.err.read_text().splitlines()
    assert run.wait() == 2 and first.startswith("error: train.steps=0 must be greater than 0")
    assert len(lines) == 1 + word.startswith("run.name") and lines[0].startswith("  model.top_k=99 exceeds")
    assert {*tmp_path.rglob("*")} == {here, here / "outputs", here / "precious", run.out, run.err}


def test_a_word_for_a_thing_gets_an_answer_about_the_thing():
    answers = {
        "lora.rank=8": (
            "unknown key 'lora.rank' on the command line ('lora.rank=8'): model.lora_rank=8 trains LoRA"
        ),
        "model=llama2_7b": "'llama2_7b': the dense families are Llama 3, as model=llama3_8b, and Qwen3",
        "model=dbrx": "this family is not there; those that are: DeepSeek-V2",
        **dict.fromkeys(
            ("model=gpt-oss", "model=gpt_oss", "model=gptoss", "model=openai/gpt-oss"),
            "': model=gpt_oss_20b, gpt_oss_120b and gpt_oss_20b_mlperf are there",
        ),
        "model=gpt-oss-20b": "model=gpt_oss_20b",
        **dict.fromkeys(("model=glm", "model=glm_4_5", "model=GLM-4.5"), "': model=glm_4_5_air is there"),
        "model=ling": "': model=ling_mini_2 and ling_flash_2 are there",
        "model=minimax": "': model=minimax_m2 is there",
        "experiment=sft": "data=chat trains on answers alone",
        "optim=soap": "the optimizers are optim=adamw and optim=muon",
        "muon.momentum=0.9": "optim=muon updates matrices by Muon",
        "optim.adam_beta1=0.9": "did you mean 'optim.beta1'?",
        "moe.sync_stage=1": "did you mean 'moe.sync_free_stage'?",
        "model.num_dense=1": "did you mean 'model.num_dense_layers'?",
        "optim.name=lion": "optim.name=lion on the command line: the optimizers are optim=adamw and",
        "data.mask_prompt=true": "data=chat trains on answers alone",
        "data.reset_attention_mask=true": "data.document_mask=true keeps attention, positions and losses",
        "model.sliding_window=16": "model.window=128 with model.attention=gqa",
        "model.num_hidden_layers=2": "did you mean 'model.num_layers'",
        "model.full_attention_interval=0": "did you mean 'model.full_every'",
        "deepspeed=ds.json": "parallel.dp_shard=fsdp2",
        "zero3=true": "parallel.dp_shard=fsdp2",
        "parallel.dp_shard=zero3": "expected one of [zero1, fsdp2]; parallel.dp_shard=zero1, the default",
        "optim.cpu_offload=true": "did you mean 'optim.offload'?",
        "offload_optimizer=true": "optim.offload=true keeps master weights and moments in the host's memory",
        "model.attention_dropout=0.1": "there is no dropout",
        "train.gradient_checkpointing=true": "recompute=all computes layers again",
        "precision=fp8": "precision.fp8=rowwise",
        "resume=true": "did you mean 'checkpoint.resume'?",
        "bf16=true": "precision=bf16 is the default on a GPU",
        "gpus=16": "launch.nproc is the number of GPUs of a node",
        "output_dir=runs": "did you mean 'run.name'?",
        "model.q_lora_rnk=8": "did you mean 'model.q_lora_rank'?",
        "model=qwen3": "did you mean model=qwen3_8b?",
    }
    for word, part in answers.items():
        found = wrong_words([word])
        assert found is not None and part in found and "\n" not in found


def test_answers_name_keys_and_values_that_there_are():
    schedules = [f"pipeline.schedule={name}" for name in SCHEDULES]  # v_half is no question about fp16
    assert [word for word in schedules if wrong_words([word])] == []
    text = " ".join(ANSWERS.values())
    named = re.findall(r"\b[a-z]+(?:\.[a-z_0-9]+)?=[A-Za-z_0-9.:]+\w", text)
    assert len(named) > 15 and [word for word in named if wrong_words([word])] == []
    assert {*re.findall(r"\b[a-z]+\.[a-z_0-9]+\b", text)} - {"package.module"} <= {*known_keys()}


REFUSED = {
    "train data=files data.paths=[corpsu.txt] data.tokenizer=no.json moe.experts=te log.wandb=true "
    "log.mlflow=true checkpoint.init_from=weigths hydra.run.dir=corpus.txt/run": (
        "data.paths: no file matches 'corpsu.txt' (looked from T); did you mean corpus.txt?",
        "data.tokenizer=no.json does not exist",
        "moe.experts=te needs the package transformer_engine, which is not installed; install it with",
        "log.wandb=true needs the package wandb",
        "log.mlflow=true needs the package mlflow",
        "checkpoint.init_from=weigths: weigths is not a folder; give a Hugging Face folder",
        "corpus.txt/run cannot be made (T/corpus.txt is not a folder)",
    ),
    "train moe.dispatcher=deepep launch.nproc=2 parallel.ep=2 model.hidden_size=256 precision.compute=bf16 "
    "train.global_batch_size=8 run.device=cpu hydra.run.dir=run/inner": (
        "moe.dispatcher=deepep needs the package",
    ),
    "train data=memmap data.paths=[tokens] data.tokenizer=empty.json checkpoint.resume_from=weights "
    "compile=none moe.experts=turbo model.attention_backend=te": (
        "data.tokenizer=empty.json is not a tokenizer.json",
        "checkpoint.resume_from=weights: weights holds no checkpoint",
        "moe.experts=turbo needs the package primus_turbo",
        "or use model.attention_backend=auto",
    ),
    "train data=files data.paths=[oth*] data.tokenizer=no.json checkpoint.init_from=weigths "
    "hydra.run.dir=other": (
        "no file matches 'oth*' (looked from T)\n",
        "checkpoint.init_from=weigths: weigths is not a folder",
    ),
    f"train checkpoint.init_from={'y' * 300}": ("cannot be a file name; use at most 255 bytes",),
    "generate run=weigths": ("has no resolved.yaml; did you mean weights?",),
    "convert from=weigths to=there": ("weigths is not a folder", "did you mean weights?"),
    "prepare input=corpus.txt tokenizer=no.json output=out": ("tokenizer=no.json does not exist",),
}
"""Command lines that this machine cannot serve, and what is said of each; T is the working folder."""
DRIVER = """
import contextlib, io, json, sys
from graphmoe.__main__ import main
from graphmoe.config import packages
packages.is_installed = lambda package: False
for words in sys.stdin.read().splitlines():
    sys.argv[:] = ["graphmoe", *words.split()]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main()
        except SystemExit as end:
            print(json.dumps([end.code, said.getvalue(), "torch" in sys.modules]))
"""


def test_what_needs_no_torch_is_refused_before_its_import(tmp_path):
    for name in ("corpus.txt", "empty.json", "tokens.idx"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "weights").mkdir()
    (tmp_path / "other_run" / "checkpoints" / "step_00000001").mkdir(parents=True)
    there = {path.name for path in tmp_path.iterdir()}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], input="\n".join(REFUSED), cwd=tmp_path, capture_output=True, text=True
    )
    found = dict(zip(REFUSED, map(json.loads, done.stdout.splitlines()), strict=True))
    for words, parts in REFUSED.items():
        status, said, has_torch = found[words]
        assert [part for part in parts if part.replace("T", str(tmp_path)) not in said] == [], said
        assert status == 2 and said.startswith("error: ") and not has_torch, words
    assert {path.name for path in tmp_path.iterdir()} == there
