"""Text from a trained run's folder."""

import re
import shutil

import pytest
import torch

from graphmoe import generate as command_generate
from graphmoe.config.schema import ConfigError, DeviceChoice
from graphmoe.data.tokenizer import load_tokenizer
from graphmoe.generate import load_model, main
from graphmoe.model.build import build_model
from graphmoe.plan.experts import Load
from graphmoe.plan.layout import Layout
from graphmoe.run.stored import run_tokenizer
from graphmoe.run.weights import run_config
from graphmoe.runtime.dispatch.symm import Symm
from graphmoe.training.evaluation import generate, model_of_one_rank
from tests.runs import TINY, assert_same_state, command, config, document_of, refusal, train_in
from tests.tolerances import relative_error


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, text_words):
    folder = tmp_path_factory.mktemp("generate")
    words = (*TINY, *text_words, "hydra.run.dir=run", "log.sample_tokens=0", "precision.compute=bf16")
    run = command(folder, *words)
    assert run.wait() == 0, run.err.read_text()
    return folder / "run"


@pytest.fixture(scope="module")
def trained(run_folder):
    model, _ = load_model(run_folder, run_config(run_folder), torch.device("cpu"))
    return load_tokenizer(run_folder / "tokenizer.json"), model


def shown(capsys, *words):
    main(list(words))
    return capsys.readouterr().out


def test_the_prompt_is_continued_the_same_way_for_the_same_seed(run_folder, capsys):
    words = (f"run={run_folder}", "prompt=the loss", "tokens=30")  # longer than the context of 16
    first = shown(capsys, *words)
    assert first.startswith("the loss") and len(first) > len("the loss\n")
    assert shown(capsys, *words) == first != shown(capsys, *words, "seed=1")


def test_a_document_before_that_of_the_prompt_is_masked_as_in_training(run_folder, tmp_path, monkeypatch):
    masked, config = shutil.copytree(run_folder, tmp_path / "run"), tmp_path / "run" / "resolved.yaml"
    config.write_text(re.sub("document_mask: false", "document_mask: true", config.read_text()))
    end, seen = run_tokenizer(masked)[2], []
    pick = "graphmoe.training.evaluation._pick"
    monkeypatch.setattr(pick, lambda logits_V, *_: seen.append(logits_V) or logits_V.argmax())
    for folder in (run_folder, masked):
        for before in ("", f"of{end}"):
            main([f"run={folder}", f"prompt={before}the loss", "tokens=1"])
    alone, *others = seen
    assert [relative_error(logits_V, alone) < 1e-4 for logits_V in others] == [False, True, True]


def test_without_temperature_the_likeliest_token_is_taken_whatever_the_seed(run_folder, trained, capsys):
    words = (f"run={run_folder}", "prompt=the loss", "tokens=5", "temperature=0")
    assert shown(capsys, *words) == shown(capsys, *words, "seed=1")
    tokenizer, model = trained
    ids = tokenizer.encode("the loss").ids
    with torch.no_grad():
        for _ in range(5):
            ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    assert shown(capsys, *words) == tokenizer.decode(ids) + "\n"


def test_text_comes_a_token_at_a_time_and_no_half_characters(trained):
    tokenizer, model = trained

    class Bytes:
        """Each id is a byte, and the model writes an e with an accent again and again."""

        encode, get_vocab_size = tokenizer.encode, tokenizer.get_vocab_size

        @staticmethod
        def decode(ids):
            return bytes((0xC3, 0xA9)[place % 2] for place in range(len(ids))).decode(errors="replace")

    pieces = list(generate(model, Bytes(), "the", 4, 0.8, seed=0))
    count = len(tokenizer.encode("the").ids) + 4
    assert "".join(pieces) == Bytes.decode([0] * count) and len([*filter(None, pieces)]) >= 2
    assert not any("\ufffd" in piece for piece in pieces[:-1])
    whole = list(generate(model, tokenizer, "the", 12, 0.8, seed=0))
    assert len([*filter(None, whole)]) > 8 and whole[0] == "the"


@pytest.mark.parametrize("memory, kind", [(1 << 40, "cuda"), (10, "cpu")])
def test_a_gpu_that_has_room_for_the_weights_is_taken(memory, kind, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("graphmoe.run.machine.open_device", lambda choice: torch.device(choice.value))
    monkeypatch.setattr("graphmoe.run.machine.memory_of", lambda device: memory)
    assert command_generate._device(DeviceChoice.auto, config().model).type == kind


@pytest.mark.parametrize(
    "planned",
    [{"layout": Layout(cp=2)}, {"layout": Layout(dp=2, cp=2, ring=True)},
     {"dispatcher": Symm(Load(4, 8), 4, 1)}],  # with room for a micro-batch
    ids=["cp", "ring", "dispatcher"],
)  # fmt: skip
def test_a_rank_that_shares_no_weights_has_all_that_one_alone_needs(planned):
    run = config("model.aux_loss=global_batch")
    shared = build_model(run.model, execution=run.moe, seed=3, **planned)
    alone = model_of_one_rank(shared, run.moe)
    tokens = torch.randint(0, run.model.vocab_size, (1, 9))
    with torch.no_grad():
        assert alone(tokens).equal(build_model(run.model, execution=run.moe, seed=3)(tokens))
    assert alone.embed.weight.data_ptr() == shared.embed.weight.data_ptr()


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp=2, ep=2), Layout(cp=2, etp=2)])
def test_a_rank_with_parts_of_the_weights_has_no_model_to_run_alone(layout):
    run = config()
    assert model_of_one_rank(build_model(run.model, layout=layout, device="meta"), run.moe) is None


def test_json_is_one_document_that_says_which_checkpoint(run_folder, capsys):
    words = (f"run={run_folder}", "tokens=3")
    document = document_of(main, capsys, *words)
    assert document["step"] == 6 and document["text"].startswith(document["prompt"])
    assert document_of(main, capsys, *words, "step=3")["step"] == 3


def test_the_weights_are_those_of_the_run(tmp_path, text_words):
    trainer = train_in(tmp_path, *text_words)
    model, step = load_model(tmp_path, config(*text_words).model, torch.device("cpu"))
    assert step == 6
    assert_same_state(model.state_dict(), trainer.model.state_dict())


@pytest.mark.parametrize(
    "words, message",
    [("tokens=0", "tokens=0 must be greater than 0"),
     ("temperature=-1", "temperature=-1.0 must be 0 or greater"),
     ("temperature=nan", "temperature=nan must be 0 or greater"),
     ("prompt=", "prompt='' has no tokens; give some text"),
     ("step=5", "has no checkpoint of step 5; it has [6, 3]"),
     ("device=cuda", "run.device=cuda, but torch sees no GPU"),
     ("promt=x", "unknown key 'promt'; did you mean 'prompt'?")],
)  # fmt: skip
def test_a_wrong_word_is_an_error_that_says_what_would_do(run_folder, capsys, words, message):
    if words == "device=cuda" and torch.cuda.is_available():
        pytest.skip("has a GPU")
    assert message in refusal(main, capsys, f"run={run_folder}", words)


def test_a_folder_without_a_run_a_tokenizer_or_a_checkpoint_is_named(run_folder, tmp_path):
    with pytest.raises(ConfigError, match=r"is not the folder of a run: it has no resolved.yaml"):
        main([f"run={tmp_path}"])
    shutil.copy(run_folder / "resolved.yaml", tmp_path)
    resolved = (tmp_path / "resolved.yaml").read_text()
    for source, remedy in [
        ("files", "; copy the tokenizer.json of its data into the run's folder"),
        ("memmap", " without data.tokenizer; copy the tokenizer.json that .* or train with data.tokenizer="),
        ("synthetic", ", random tokens that stand for no text; train on text"),
    ]:
        (tmp_path / "resolved.yaml").write_text(resolved.replace("source: files", f"source: {source}"))
        with pytest.raises(ConfigError, match=f"no tokenizer.json: .* data.source={source}{remedy}"):
            main([f"run={tmp_path}"])
    shutil.copy(run_folder / "tokenizer.json", tmp_path)
    with pytest.raises(ConfigError, match="holds no checkpoint: none was saved yet"):
        main([f"run={tmp_path}"])


def test_a_model_larger_than_the_memory_is_refused_before_it_is_made(run_folder, tmp_path):
    for name in ("resolved.yaml", "tokenizer.json"):
        shutil.copy(run_folder / name, tmp_path)
    text = (tmp_path / "resolved.yaml").read_text().replace("kv_lora_rank: 8", "kv_lora_rank: 2000000000")
    (tmp_path / "resolved.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"model whose weights take [\d.]+ GiB in fp32, and this cpu has"):
        main([f"run={tmp_path}"])
