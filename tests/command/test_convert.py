"""The converter, folders of our own format, and runs that start from either kind of weights."""

import json
import logging
import os
import shlex
from dataclasses import fields, replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from graphmoe import load_hf, save_hf
from graphmoe.checkpoint import CheckpointError
from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.config.schema import CheckpointConfig, ConfigError, ModelConfig, ScoreFunction
from graphmoe.convert import ConvertArgs, WeightDtype, convert, main
from graphmoe.data.tokenizer import END_OF_TEXT, train_bpe
from graphmoe.model.build import build_model
from graphmoe.run.weights import FolderKind, explained_mismatch, load_weights, model_to_yaml, open_weights
from tests.runs import command, document_of, refusal

CONFIG = ModelConfig(
    vocab_size=53, hidden_size=18, num_layers=3, dense_ffn_size=21, num_heads=3, q_lora_rank=7,
    kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, num_experts=6, top_k=2,
    expert_ffn_size=9, shared_ffn_size=18, score_function=ScoreFunction.sigmoid, renormalise=True,
    selection_bias=True, mtp_depth=1, context_length=128,
)  # fmt: skip


def random_model(config=CONFIG, seed=0):
    model = build_model(config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
    return model


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    assert [name for name, tensor in a.items() if not torch.equal(tensor, b[name])] == []


@pytest.fixture
def hf(tmp_path):
    model = random_model()
    ids = {"bos_token_id": 3, "eos_token_id": [4, 5]}
    save_hf(model, CONFIG, tmp_path / "hf", max_shard_size="9KB", token_ids=ids)
    (tmp_path / "hf" / "tokenizer.json").write_text('{"of": "hf"}')
    return tmp_path / "hf", model


def make_run(folder, states, config=CONFIG, **sections):
    store = CheckpointStore(folder / "checkpoints", CheckpointConfig())
    for step, state in states.items():
        store.save(step, state)
    store.close()
    sections["model"] = yaml.safe_load(model_to_yaml(config))
    (folder / "resolved.yaml").write_text(yaml.safe_dump(sections))
    train_bpe(iter(["a text"]), 300, 1).save(str(folder / "tokenizer.json"))


@pytest.fixture
def run(tmp_path):
    """The folder of a run with checkpoints of steps 10 and 20, and the model of each step."""
    models = {step: random_model(seed=step) for step in (10, 20)}
    rest = {"optimizer": {"m": torch.ones(3)}}
    states = {step: {"model": model.state_dict(), "step": step, **rest} for step, model in models.items()}
    make_run(tmp_path / "outputs" / "a-run", states, data={"tokenizer": None})
    return tmp_path / "outputs" / "a-run", models


call = partial(document_of, main)


def test_a_folder_goes_to_our_format_and_back_with_every_bit(hf, tmp_path, capsys):
    folder, model = hf
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "notes.txt").write_text("mine")
    words = (f"from={folder}", f"to={tmp_path / 'own'}", "overwrite=true")
    call(capsys, *words, "max_shard_size=7KB")  # whose weights give way to those of the next
    assert len(list((tmp_path / "own").glob("weights-*.safetensors"))) > 3
    report = call(capsys, *words)
    names = {"notes.txt", "model", "weights.json", "weights.safetensors", "tokenizer.json"}
    assert {*os.listdir(tmp_path / "own")} == names
    assert (report["target"], report["from_kind"], report["dtypes"]) == ("graphmoe", "hf", ["float32"])
    assert report["parameters"] == sum(p.numel() for p in model.parameters())
    back = call(capsys, f"from={tmp_path / 'own'}", f"to={tmp_path / 'back'}", "max_shard_size=9KB")
    assert (back["target"], back["family"]) == ("hf", "deepseek_v3")
    for path in sorted(folder.iterdir()):
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes(), path.name
    assert_same_weights(load_hf(tmp_path / "back")[1].state_dict(), model.state_dict())


def test_the_command_for_a_converted_folder_takes_its_model(hf, tmp_path, capsys):
    folder, model = hf
    report = call(capsys, f"from={folder}", f"to={tmp_path / 'my model'}", "name=a/b c")
    assert "model/a-b-c.yaml" in report["files"] and "my model" in report["command"]
    words = shlex.split(report["command"])[3:]
    there = {*tmp_path.rglob("*")}
    done = command(tmp_path, *words, "data=synthetic", "format=json", module="graphmoe.info")
    assert done.wait() == 0, done.err.read_text()
    told = json.loads(done.out.read_text())
    assert (told["model"], told["seq_len"]) == ("a-b-c", CONFIG.context_length)
    assert told["parameters"]["total"]["full"] == report["parameters"]
    assert {*tmp_path.rglob("*")} == there | {done.out, done.err}


def test_the_newest_checkpoint_of_a_run_is_exported_with_its_tokenizer(run, tmp_path, capsys):
    folder, models = run
    main([f"from={folder}", f"to={tmp_path / 'text'}"])
    assert "(run folder, step 20) -> " in capsys.readouterr().out
    report = call(capsys, f"from={folder}", f"to={tmp_path / 'out'}")
    assert (report["step"], report["from_kind"], report["family"]) == (20, "run", "deepseek_v3")
    config, model = load_hf(tmp_path / "out")
    assert config.name == "out"
    assert_same_weights(model.state_dict(), models[20].state_dict())
    own = (folder / "tokenizer.json").read_bytes()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == own
    assert sorted(report["files"]) == sorted(os.listdir(tmp_path / "out"))


def test_a_run_is_exported_with_the_chat_template_that_it_named(run, tmp_path, capsys):
    resolved = run[0] / "resolved.yaml"
    document = yaml.safe_load(resolved.read_text())
    (tmp_path / "secret").write_text("of this machine")
    document["data"]["chat_template"] = str(tmp_path / "secret")
    resolved.write_text(yaml.safe_dump(document))
    copy = run[0] / "chat_template.jinja"
    assert copy.name not in call(capsys, f"from={run[0]}", f"to={tmp_path / 'none'}")["files"]
    copy.symlink_to(tmp_path / "secret")
    assert copy.name not in call(capsys, f"from={run[0]}", f"to={tmp_path / 'link'}")["files"]
    copy.unlink()
    copy.write_text("{{ messages }}")
    assert copy.name in call(capsys, f"from={run[0]}", f"to={tmp_path / 'out'}")["files"]
    assert (tmp_path / "out" / copy.name).read_text() == "{{ messages }}"


@pytest.mark.parametrize("kept", ["start", "tokenizer", "another run"])
def test_a_run_keeps_the_begin_token_of_the_weights_it_began_with(run, hf, tmp_path, capsys, kept):
    resolved = run[0] / "resolved.yaml"
    document = yaml.safe_load(resolved.read_text())
    document["checkpoint"] = {"init_from": "gone" if kept == "tokenizer" else str(hf[0])}
    if kept == "tokenizer":
        train_bpe(iter(["a text"]), 300, 1).save(str(hf[0] / "tokenizer.json"))
        document["data"]["tokenizer"] = str(hf[0] / "tokenizer.json")
    if kept == "another run":
        (tmp_path / "first").mkdir()
        (tmp_path / "first" / "resolved.yaml").write_text(yaml.safe_dump(document))
        document["checkpoint"] = {"resume_from": str(tmp_path / "first")}
    resolved.write_text(yaml.safe_dump(document))
    call(capsys, f"from={run[0]}", f"to={tmp_path / 'out'}")
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (found["bos_token_id"], found["eos_token_id"], found["pad_token_id"]) == (3, 0, None)


@pytest.mark.slow
def test_transformers_stops_at_the_token_that_ends_a_document_of_the_run(run, tmp_path, capsys, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    call(capsys, f"from={run[0]}", f"to={tmp_path / 'own'}", "target=graphmoe")
    call(capsys, f"from={run[0]}", f"to={tmp_path / 'direct'}")
    call(capsys, f"from={tmp_path / 'own'}", f"to={tmp_path / 'twice'}")
    for folder in (tmp_path / "direct", tmp_path / "twice"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert (tokenizer.eos_token, tokenizer.eos_token_id) == (END_OF_TEXT, 0)
        assert tokenizer.model_max_length == CONFIG.context_length
        text = "a text , and 'm more ."
        assert tokenizer.decode(tokenizer(text).input_ids) == text
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
        assert model.config.eos_token_id == model.generation_config.eos_token_id == 0
        with torch.no_grad():
            model.lm_head.weight.zero_()  # all tokens are as likely, and the first is taken: the end
        out_BT = model.generate(torch.tensor([[5, 6]]), max_new_tokens=9, do_sample=False, pad_token_id=0)
        assert out_BT.tolist() == [[5, 6, 0]]


def test_the_end_is_that_of_the_data_whatever_the_tokenizer_was_made_for(run, tmp_path, capsys):
    folder, place = run[0], tmp_path / "tokenizer"
    tokenizer = train_bpe(iter(["a text"]), 300, 1)
    tokenizer.add_special_tokens(["<eod>"])
    place.mkdir()
    tokenizer.save(str(place / "mine.json"))
    (place / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (place / "generation_config.json").write_text('{"eos_token_id": 0, "temperature": 0.1}')
    data = {"tokenizer": str(place / "mine.json"), "eod_token": "<eod>"}
    make_run(folder, {}, data=data)
    tokenizer.save(str(folder / "tokenizer.json"))  # a run keeps a copy
    report = call(capsys, f"from={folder}", f"to={tmp_path / 'out'}")
    end = tokenizer.token_to_id("<eod>")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == end
    for ours, theirs in (("tokenizer.json", "mine.json"), ("tokenizer_config.json", "tokenizer_config.json")):
        assert (tmp_path / "out" / ours).read_bytes() == (place / theirs).read_bytes()
    assert len(report["files"]) == len(set(report["files"])) == 5


@pytest.mark.parametrize("theirs", ["other", "damaged", "same"])
def test_the_copy_in_the_run_s_folder_wins(run, tmp_path, capsys, monkeypatch, theirs):
    """A relative data.tokenizer names another file in the reader's folder, unless that one is equal."""
    own, other = (train_bpe(iter([text]), 300, 1) for text in ("a text", "other words"))
    make_run(run[0], {}, data={"tokenizer": "tokenizer.json"})
    own.save(str(run[0] / "tokenizer.json"))
    (reader := tmp_path / "reader").mkdir()
    monkeypatch.chdir(reader)
    named = {"other": other.to_str(), "damaged": "{", "same": own.to_str()}[theirs]
    (reader / "tokenizer.json").write_text(named)
    (reader / "special_tokens_map.json").write_text("{}")
    report = call(capsys, f"from={run[0]}", f"to={tmp_path / 'out'}")
    written = (tmp_path / "out" / "tokenizer.json").read_text()
    assert written == (named if theirs == "same" else (run[0] / "tokenizer.json").read_text())
    assert ("special_tokens_map.json" in report["files"]) == (theirs == "same")


def test_a_run_without_a_tokenizer_or_an_end_is_exported_without_one(run, tmp_path, capsys):
    tokenizer = train_bpe(iter(["a text"]), 300, 1).to_str().replace(END_OF_TEXT, "<stop>")
    (run[0] / "tokenizer.json").write_text(tokenizer)
    call(capsys, f"from={run[0]}", f"to={tmp_path / 'no-end'}")
    (run[0] / "tokenizer.json").unlink()
    call(capsys, f"from={run[0]}", f"to={tmp_path / 'none'}")
    for name, others in {"no-end": {"tokenizer.json"}, "none": set()}.items():
        assert json.loads((tmp_path / name / "config.json").read_text())["eos_token_id"] is None
        assert {*os.listdir(tmp_path / name)} == {"config.json", "model.safetensors", *others}


@pytest.mark.parametrize("bias", [True, False])
def test_the_fp32_main_weights_of_a_bf16_run_are_taken(tmp_path, capsys, bias):
    config = replace(CONFIG, selection_bias=bias)
    exact, folder = random_model(config), tmp_path / "run"
    rounded = build_model(config, seed=None, dtype=torch.bfloat16)
    rounded.load_state_dict(exact.state_dict())
    main_weights = {name: parameter.detach() for name, parameter in exact.named_parameters()}
    state = {"model": rounded.state_dict(), "optimizer": {"main": main_weights}}
    make_run(folder, {3: state}, config, precision={"compute": "bf16"})
    report = call(capsys, f"from={folder}", f"to={tmp_path / 'own'}", "target=graphmoe")
    assert report["dtypes"] == ["float32"]
    for place in (folder, tmp_path / "own"):
        target = build_model(config, seed=7)
        load_weights(target, place)
        assert_same_weights(target.state_dict(), exact.state_dict())


def test_a_step_or_a_checkpoint_of_a_run_can_be_named_and_all_keys_survive(run, tmp_path, capsys):
    folder, models = run
    call(capsys, f"from={folder}", f"to={tmp_path / 'a'}", "step=10", "target=graphmoe")
    words = (f"from={folder}/checkpoints/step_00000010", f"to={tmp_path / 'b'}")
    assert call(capsys, *words)["step"] == 10
    assert open_weights(tmp_path / "a").config == replace(CONFIG, name="a")
    option = yaml.safe_load((tmp_path / "a" / "model" / "a.yaml").read_text())
    assert list(option) == [f.name for f in fields(ModelConfig)]
    own = random_model(seed=5)
    assert load_weights(own, tmp_path / "a") is FolderKind.graphmoe
    assert_same_weights(own.state_dict(), models[10].state_dict())
    assert_same_weights(load_hf(tmp_path / "b")[1].state_dict(), models[10].state_dict())


@pytest.mark.parametrize(("word", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_are_cast_but_the_router_bias_is_not(hf, tmp_path, capsys, word, dtype):
    folder, model = hf
    report = call(capsys, f"from={folder}", f"to={tmp_path / 'own'}", f"dtype={word}")
    assert report["dtypes"] == sorted([str(dtype)[6:], "float32"])
    weights = open_weights(tmp_path / "own")
    for name, tensor in model.state_dict().items():
        kept = torch.float32 if name.endswith("selection_bias") else dtype
        assert torch.equal(weights.files.read(name), tensor.to(kept)) and weights.files.dtype([name]) is kept
    call(capsys, f"from={tmp_path / 'own'}", f"to={tmp_path / 'back'}", "dtype=fp32")
    _, again = load_hf(tmp_path / "back")
    assert torch.equal(again.embed.weight, model.embed.weight.to(dtype).float())


@pytest.mark.parametrize("kind", list(FolderKind))
def test_a_model_takes_the_weights_of_each_kind_of_folder_in_place(kind, hf, run, tmp_path, capsys):
    folder, model = hf
    call(capsys, f"from={folder}", f"to={tmp_path / 'own'}")
    place = {FolderKind.hf: folder, FolderKind.graphmoe: tmp_path / "own", FolderKind.run: run[0]}[kind]
    expected = (run[1][20] if kind is FolderKind.run else model).state_dict()
    target = build_model(CONFIG, seed=7, dtype=torch.bfloat16)
    pointers = [parameter.data_ptr() for parameter in target.parameters()]
    assert load_weights(target, place) is kind
    assert pointers == [parameter.data_ptr() for parameter in target.parameters()]
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


def test_weights_of_another_model_change_nothing_and_name_its_keys_and_ten_tensors(hf, run, tmp_path, capsys):
    folder, _ = hf
    call(capsys, f"from={folder}", f"to={tmp_path / 'own'}")
    target = build_model(replace(CONFIG, num_experts=5, kv_lora_rank=12, mtp_depth=0, peak_lr=1.0), seed=7)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    for place in (folder, tmp_path / "own", run[0]):
        with pytest.raises((ConfigError, CheckpointError)) as caught:
            load_weights(target, place)
        first, second, *rest = str(caught.value).splitlines()
        keys = ("model.num_experts: 6 -> 5", "model.kv_lora_rank: 10 -> 12", f"use model={place} and")
        assert all(part in first for part in keys) and "peak_lr" not in first
        assert len(rest) == 11 and rest[-1].endswith(f"... and {7 if place == run[0] else 26} more")
        assert_same_weights(target.state_dict(), before)
    assert "step_00000020 does not fit the state in" in second
    assert f"{run[0]} is of another model (model." in first and "; its own -> this run's); use" in first


def test_a_mismatch_that_no_key_of_the_model_explains_says_what_takes_weights_only(run, tmp_path):
    own = run[0] / "checkpoints"
    said = {own: "(?s)same model.* checkpoint.init_from, .*unexpected in"}
    for place, match in (said | {tmp_path / "elsewhere" / "a": r"\A\S+ does not fit the state"}).items():
        with pytest.raises(CheckpointError, match=match), explained_mismatch(place, CONFIG):
            CheckpointStore.open_any(run[0]).load({"step": 0})


def test_keys_that_change_what_the_weights_compute_are_logged(hf, caplog):
    folder, model = hf
    target = build_model(replace(CONFIG, rope_theta=500.0, top_k=3), seed=7)
    with caplog.at_level(logging.WARNING):
        load_weights(target, folder)
    said = [record.getMessage().split(" as in ")[0] for record in caplog.records]
    assert said == ["model.rope_theta=500.0, not 10000.0", "model.top_k=3, not 2"]
    assert_same_weights(target.state_dict(), model.state_dict())


def test_weights_that_their_dtype_cannot_hold_are_refused_by_name(hf, tmp_path):
    convert(ConvertArgs(from_=hf[0], to=tmp_path / "own"))
    file = tmp_path / "own" / "weights.safetensors"
    tensors = load_file(file)
    tensors["embed.weight"][3, 1] = 7e4  # more than fp16 has
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"embed\S* has values that are not finite as torch.float16"):
        convert(ConvertArgs(from_=tmp_path / "own", to=tmp_path / "half", dtype=WeightDtype.fp16))
    assert not (tmp_path / "half").exists()


def test_what_cannot_be_converted_is_an_error_on_one_line(hf, run, tmp_path, capsys, monkeypatch):
    full = Mock(side_effect=SafetensorError("I/O error: No space left on device (os error 28)"))
    monkeypatch.setattr("graphmoe.checkpoint.hf.tensor_files.save_file", full)
    folder, _ = hf
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    calls = {
        f"from={tmp_path} to={tmp_path / 'x'}": "holds no weights",
        f"from={folder} to={tmp_path / 'full'}": "is not empty; use overwrite=true",
        f"from={folder} to={folder} overwrite=true": "is the folder to read from",
        f"from={folder} to={tmp_path / 'x'} target=hf": "is a Hugging Face folder already",
        f"from={folder} to={tmp_path / 'x'} step=3": "step=3 chooses a run's checkpoint",
        f"from={folder} to={tmp_path / 'x'} max_shard_size=5XB": "max_shard_size=5XB is not a size",
        f"from={run[0]} to={tmp_path / 'x'} step=15": "no checkpoint of step 15",
        f"from={run[0]} to={tmp_path / 'x'}": "model.safetensors cannot be written: I/O error: No space left",
    }
    for line, expected in calls.items():
        assert expected in refusal(main, capsys, *line.split()).replace("\n", " ")
    assert {*os.listdir(tmp_path)} == {"full", "hf", "outputs"}
