"""data=chat: rows, tokens with a loss, packing, what is too long, order and resume."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from graphmoe.config.schema import ConfigError, DataConfig, TooLong, TrainOn
from graphmoe.config.token_flags import ID_BITS, NO_LABEL, START
from graphmoe.data import Loader, open_data
from graphmoe.data.chat import ChatRecipe, Plain, read_row
from graphmoe.data.chat_template import chat_template
from graphmoe.data.errors import DataError
from graphmoe.data.packing import best_fit
from graphmoe.data.sources import missing_inputs
from graphmoe.data.tokenise import tokenise_files
from tests.data.chats import (
    CALLS,
    CHATML,
    GENERATION,
    TALK,
    TOOL,
    TOOLS,
    conversations,
    write_rows,
    write_tokenizer,
)

V = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("chat") / "tokenizer")


@pytest.fixture
def opened(folder, cache, tmp_path):
    """A function that writes rows and opens them; without validation unless asked."""

    def open_rows(rows, seq_len=64, template=None, **keys):
        keys = {"val_fraction": 0.0, "shuffle": False, "tokenizer": str(folder)} | keys
        if template is not None:
            (tmp_path / "t.jinja").write_text(template)
            keys["chat_template"] = str(tmp_path / "t.jinja")
        path = write_rows(tmp_path / "rows.jsonl", rows)
        return open_data(DataConfig("chat", paths=[str(path)], **keys), seq_len=seq_len, vocab_size=V)

    return open_rows


def texts_of(corpus):
    """Of each stored conversation its text, and that of its tokens with a loss."""
    documents = corpus.train.documents
    found = []
    for number in range(documents.num_documents):
        x_T = documents.tokens(number, 0, 10**6).astype(np.int64)
        assert x_T[0] & START and x_T[0] & NO_LABEL and not (x_T[1:] & START).any()
        parts = (x_T & ID_BITS, x_T[(x_T & NO_LABEL) == 0])
        found.append([corpus.tokenizer.decode(ids.tolist(), skip_special_tokens=False) for ids in parts])
    return found


def test_tokens_and_losses_are_those_of_transformers(folder, opened):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    rows = [*conversations(20), {"messages": TALK}]
    documents = opened(rows, 400, GENERATION).train.documents
    asked = {"return_assistant_tokens_mask": True, "return_dict": True, "chat_template": GENERATION}
    assert documents.num_documents == len(rows)
    for number, row in enumerate(rows):
        expected = theirs.apply_chat_template(row["messages"], **asked)
        x_T = documents.tokens(number, 0, 10**6)
        assert (x_T & ID_BITS).tolist() == expected["input_ids"]
        assert ((x_T & NO_LABEL) == 0).astype(int).tolist() == expected["assistant_masks"]


@pytest.mark.parametrize("template", [CHATML, GENERATION], ids=["chatml", "generation"])
def test_a_loss_is_on_what_train_on_and_train_say(opened, template):
    talk = [dict(message) for message in TALK]
    answers = [f"{message['content']}<|im_end|>" for message in TALK[2::2]]

    def losses(train_on, **train):
        for index, value in train.items():
            talk[int(index[1:])]["train"] = value
        (found,) = texts_of(opened([{"messages": talk}], 400, template, train_on=train_on))
        return found

    assert losses(TrainOn.assistant)[1] == "".join(answers)
    whole, all_of_it = losses(TrainOn.all)
    assert all_of_it == whole.removeprefix("<|im_start|>")
    assert losses(TrainOn.assistant, m2=False)[1] == answers[1]
    assert losses(TrainOn.all, m2=False)[1] == whole.removeprefix("<|im_start|>").replace(answers[0], "", 1)
    assert losses(TrainOn.field, m2=True)[1] == answers[0]
    expected = f"<|im_start|>user\n{TALK[3]['content']}<|im_end|>"
    assert losses(TrainOn.field, m2=False, m3=True)[1] == expected


def test_prompts_completions_and_texts(opened):
    asked, answer = TALK[:2], [{"role": "assistant", "content": "router"}]
    rows = [
        {"prompt": "the loss of", "completion": " an expert", "other": 1},
        {"prompt": asked, "completion": answer, "messages": None},
        {"text": "gradients wait<|im_end|>"},
    ]
    end = "<|im_end|>"
    found = texts_of(opened(rows, 400))
    assert [loss for _, loss in found[:2]] == [f" an expert{end}", f"router{end}"]
    text, loss = found[2]
    assert text == f"gradients wait{end}" and text.endswith(loss) and loss.endswith(f" wait{end}")
    assert loss != text
    assert found[0][0] == f"the loss of an expert{end}" and found[1][0].startswith("<|im_start|>system\n")
    assert read_row(rows[0], TrainOn.all) == Plain("the loss of an expert", 0)
    assert read_row(rows[1], TrainOn.all)[1:] == ([], None, True)
    assert read_row(rows[1], TrainOn.field).wanted == [2]


def test_tools_of_a_row_are_given_to_the_template(opened):
    rows = [{"messages": CALLS, "tools": tools} for tools in ([TOOL], json.dumps([TOOL]))]
    first, second = texts_of(opened(rows, 1000, TOOLS))
    assert first == second and '"name": "sum"' in first[0] and first[1].endswith("loss<|im_end|>")


BAD = {
    "list": ([1], "a JSON object is expected, not list"),
    "other": ({"question": "a", "answer": 1}, r"a row with question \(str\), answer \(int\); valid is mess"),
    "half": ({"prompt": "a"}, r"a row with prompt \(str\); valid is .* prompt and completion"),
    "mixed": ({"prompt": "a", "completion": [{}]}, "prompt is str, not a list of messages"),
    "empty": ({"messages": []}, "messages is an empty list, not a list of messages"),
    "role": ({"messages": [{"role": "bot", "content": ""}]}, "message 1 of messages has the role 'bot', not"),
    "content": ({"messages": [{"role": "user", "content": 1}]}, "message 1 of messages has int content, not"),
    "none": ({"messages": [{"role": "user"}]}, "message 1 of messages has no content, not a text"),
    "train": ({"messages": [{"role": "user", "content": "", "train": 1}]}, "has train=1, not true or false"),
    "tools": ({"messages": TALK, "tools": "{"}, "tools is a text that is not JSON"),
    "refused": ({"messages": TALK[:1]}, "needs a user"),
}
PICKY = "{% if messages[0].role == 'system' %}{{ raise_exception('it needs a user') }}{% endif %}"


@pytest.mark.parametrize("name", BAD)
def test_a_row_of_another_form_is_one_line_with_its_place(opened, name):
    row, message = BAD[name]
    rows = [*conversations(2), row]
    with pytest.raises(DataError, match=rf"rows.jsonl:3: .*{message}") as error:
        opened(rows, template=PICKY + CHATML)
    assert "\n" not in str(error.value) and "data.skip_bad=true" in str(error.value)
    assert opened(rows, template=PICKY + CHATML, skip_bad=True).bad.total() == 1


def test_several_processes_write_the_same_files(folder, tmp_path):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = chat_template(DataConfig("chat", tokenizer=str(folder)), tokenizer)
    files = [write_rows(tmp_path / f"{seed}.jsonl", conversations(8, seed)) for seed in range(3)]
    recipe = ChatRecipe(
        folder / "tokenizer.json", None, "text", V, False, template=template, train_on=TrainOn.all,
        too_long=TooLong.skip, most_tokens=99,
    )  # fmt: skip
    notes = []
    for workers in (1, 2):
        tokenise_files(files, recipe, tmp_path / str(workers), workers=workers, on_notes=notes.append)
    assert (tmp_path / "1.bin").read_bytes() == (tmp_path / "2.bin").read_bytes()
    assert notes[0] == notes[1] and notes[0]["conversations"] + notes[0]["too_long"] == 24


def test_rows_of_parquet_files_are_those_of_jsonl(opened, folder, tmp_path, cache):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = conversations(9)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    config = DataConfig("chat", paths=[str(tmp_path / "rows.parquet")], tokenizer=str(folder), val_fraction=0)
    assert texts_of(open_data(config, seq_len=64, vocab_size=V)) == texts_of(opened(rows))


def test_what_is_too_long_is_cut_or_left_out_and_counted(opened, caplog):
    rows = [{"prompt": "", "completion": " loss" * n} for n in (3, 100, 4)]
    rows.append({"prompt": " loss" * 100, "completion": "no"})
    cut, left = (opened(rows, 30, too_long=choice) for choice in TooLong)
    for corpus, lengths, kept, empty in ((cut, [4, 31, 5], 3, 1), (left, [4, 5], 2, 0)):
        assert corpus.train.documents.length_N.tolist() == lengths
        facts = {name: corpus.counts[name] for name in ("too_long", "without_loss", "conversations")}
        assert facts == {"too_long": 2, "without_loss": empty, "conversations": kept}
        documents = corpus.train.documents
        assert corpus.counts["tokens"] == documents.num_tokens and documents.length_N.max() <= 31
        stored = np.concatenate([documents.tokens(n, 0, 99) for n in range(documents.num_documents)])
        assert corpus.counts["trained_tokens"] == ((stored & NO_LABEL) == 0).sum()
    assert "2 conversations longer than data.seq_len + 1 = 31 tokens, cut by data.too_long=t" in caplog.text
    with pytest.raises(DataError, match="the corpus is empty: .*; too long: 1"):
        opened(rows[1:2], 30, too_long=TooLong.skip)


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_kept_token_is_in_an_epoch_exactly_once(opened, shuffle):
    corpus = opened(conversations(60), 96, shuffle=shuffle)
    documents, samples = corpus.train.documents, corpus.train
    whole = sorted(documents.tokens(n, 0, 999).tolist() for n in range(documents.num_documents))
    for epoch in range(2):
        found = []
        for position in range(samples.num_samples):
            x_T = samples.sample(epoch * samples.num_samples + position)
            assert x_T.shape == (97,) and x_T[0] & START
            starts = [*np.flatnonzero(x_T & START), 97]
            parts = [x_T[a:b].tolist() for a, b in zip(starts, starts[1:], strict=False)]
            used = 0
            while used < len(parts) and any(not x & NO_LABEL for x in parts[used]):
                used += 1
            found += parts[:used]
            # what fills the rest has no loss, and is the beginning of the same sequence
            rest = [x for part in parts[used:] for x in part]
            head = [x | NO_LABEL for part in parts[:used] for x in part]
            assert rest == (head * 97)[: len(rest)]
        assert sorted(found) == whole
    assert documents.num_tokens / (samples.num_samples * 97) > 0.85


def test_best_fit_is_as_full_as_it_can_be():
    length_N = np.random.default_rng(0).integers(1, 60, 3000)
    order_N, end_M = best_fit(length_N, 100)
    assert sorted(order_N.tolist()) == [*range(3000)] and end_M[-1] == 3000
    sums = np.add.reduceat(length_N[order_N], np.concatenate([[0], end_M[:-1]]))
    assert sums.max() <= 100 and len(end_M) <= 1.02 * np.ceil(length_N.sum() / 100)


def test_order_is_that_of_one_rank_and_a_resume_is_exact(opened, tmp_path):
    corpus = opened(conversations(80), 96, shuffle=True, seed=3)
    plain, state, rows = corpus.train.reader().read(0, 48), None, []
    for world in (1, 2, 4, 1):
        loaders = [
            Loader(corpus.train, micro_batch_size=1, global_batch_size=4, rank=r, world_size=world)
            for r in range(world)
        ]
        [loader.load_state_dict(state) for loader in loaders if state]
        rows += [next(loader) for _ in range(12 // world) for loader in loaders]
        state = json.loads(json.dumps(loaders[0].state_dict()))
        [loader.close() for loader in loaders]
    assert torch.cat(rows).equal(torch.from_numpy(plain))
    other = opened(conversations(80), 96, shuffle=True, seed=4)
    with pytest.raises(ConfigError, match="the data is not that of the checkpoint"):
        Loader(other.train, micro_batch_size=1, global_batch_size=4).load_state_dict(state)
    masked = opened(conversations(80), 96, shuffle=True, seed=3, train_on=TrainOn.all)
    with pytest.raises(ConfigError, match="the data has other tokens"):
        Loader(masked.train, micro_batch_size=1, global_batch_size=4).load_state_dict(state)


def test_validation_holds_out_whole_conversations(opened):
    for count, share, expected in ((60, 0.1, 6), (5, 0.05, 1)):
        corpus = opened(conversations(count), val_fraction=share)
        held, left = corpus.val.documents, corpus.train.documents
        assert (held.num_documents, left.num_documents) == (expected, count - expected)
        assert all(held.tokens(n, 0, 1)[0] & START for n in range(expected))
    assert opened(conversations(1), val_fraction=0.1).val is None


def test_weights_mix_conversations_of_paths(opened, folder, tmp_path, cache):
    paths = [write_rows(tmp_path / f"{seed}.jsonl", conversations(30, seed)) for seed in (1, 2)]
    config = DataConfig(
        "chat", paths=[*map(str, paths)], weights=[0.75, 0.25], tokenizer=str(folder), val_fraction=0
    )
    corpus = open_data(config, seq_len=64, vocab_size=V)
    heads = {x: {tuple(p.sample(i)) for i in range(p.num_samples)} for x, p in enumerate(corpus.train.parts)}
    samples = [tuple(corpus.train.sample(i)) for i in range(1024)]
    assert sum(sample in heads[0] for sample in samples) == 768


def test_inputs_that_are_missing_are_named_before_a_run(folder, tmp_path):
    (tmp_path / "a.txt").write_text("x")
    config = DataConfig("chat", paths=[str(tmp_path / "a.txt")], tokenizer=str(folder), chat_template="no")
    template, paths = missing_inputs(config, V)
    assert "data.chat_template=no is not a file" in template and "use files in .jsonl, .parquet" in paths
    (few,) = missing_inputs(DataConfig("chat", tokenizer=str(folder)), 9)
    count = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    assert f"has {count} ids, more than model.vocab_size=9; use model.vo" in few
