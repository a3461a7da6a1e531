"""data=files: reading, errors with file and line, the cache, processes."""

import itertools
import os
import subprocess
import sys

import numpy as np
import psutil
import pytest
import torch

from graphmoe.config.schema import ConfigError, DataConfig
from graphmoe.data import DataError, open_data
from graphmoe.data.indexed import read_token_file
from graphmoe.data.tokenise import Recipe, tokenise_files
from graphmoe.data.tokenizer import encode, num_ids
from tests.data.test_loader import rows_over_ranks
from tests.data.texts import sentences, write_jsonl
from tests.runs import ROOT

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402


@pytest.fixture
def open_files(tokenizer_path, cache, tmp_path):
    def open_files(*patterns, seq_len=16, vocab_size=400, **changes):
        paths = [str(tmp_path / pattern) for pattern in patterns]
        changes = {"val_fraction": 0.0, "shuffle": False, "tokenizer": str(tokenizer_path), **changes}
        config = DataConfig(source="files", paths=paths, **changes)
        return open_data(config, seq_len=seq_len, vocab_size=vocab_size)

    return open_files


def texts_of(corpus) -> list[str]:
    file = corpus.train.documents.files[0]
    rows = [file.tokens_T[a : a + n].tolist() for a, n in zip(file.start_N, file.length_N, strict=True)]
    assert all(row[-1] == 0 for row in rows), "each document ends with the end token"
    return [corpus.tokenizer.decode(row[:-1]) for row in rows]


def test_txt_jsonl_and_parquet_give_their_documents_in_order(open_files, tmp_path):
    texts = sentences(30)
    texts[1] += "\n\u00fc\u4e16"
    (tmp_path / "a.txt").write_text(texts[0], encoding="utf-8")
    (tmp_path / "b.txt").write_text("\ufeff" + texts[1], encoding="utf-8")
    write_jsonl(tmp_path / "c.jsonl", texts[2:20])
    table = pa.table({"id": list(range(10)), "text": texts[20:]})
    pq.write_table(table, tmp_path / "d.parquet", row_group_size=3)
    corpus = open_files("*.txt", "*.jsonl", "*.parquet")
    assert texts_of(corpus) == texts
    assert corpus.counts["train_documents"] == 30 and corpus.bad == {} and corpus.end_token == 0


GOOD = b'{"text": "the loss of an expert is shown for each token and router while gradients wait"}\n'


@pytest.mark.parametrize(
    ("line", "message", "kind"),
    [
        (b'{"text": "half of a', "not JSON", "bad JSON line"),
        (b'["text"]', "object is expected, not list", "record without text"),
        (b'{"body": "x", "id": 3}', r"no field 'text' \(it has: body, id\)", "record without text"),
        (b'{"text": null}', "field 'text' is NoneType", "record without text"),
        (b'{"text": "\xff"}', "not UTF-8", "line that is not UTF-8"),
        (b'{"text": "\\ud800"}', "surrogate", "text with a lone surrogate"),
    ],
)
def test_a_bad_line_names_file_and_line_or_is_counted_and_skipped(
    open_files, tmp_path, caplog, line, message, kind
):
    (tmp_path / "a.jsonl").write_bytes(GOOD * 5 + line + b"\n" + GOOD * 2)
    with pytest.raises(DataError, match=rf"a\.jsonl:6: .*{message}.*data.skip_bad=true"):
        open_files("a.jsonl")
    corpus = open_files("a.jsonl", skip_bad=True)
    assert corpus.bad == {kind: 1} and len(texts_of(corpus)) == 7
    assert f"bad records skipped: 1 (1 {kind})" in caplog.text
    with pytest.raises(DataError, match="a.jsonl:6"):  # though the cache has an entry by now
        open_files("a.jsonl")


@pytest.mark.parametrize("part_bytes", [1, 7, 88, 89, 1000])
def test_parts_of_any_size_give_each_line_once(open_files, tmp_path, monkeypatch, part_bytes):
    texts = sentences(12)
    write_jsonl(tmp_path / "a.jsonl", texts)
    monkeypatch.setattr("graphmoe.data.text_files.PART_BYTES", part_bytes)
    assert texts_of(open_files("a.jsonl")) == texts


def test_a_truncated_parquet_file_names_file_and_bytes(open_files, tmp_path):
    pq.write_table(pa.table({"text": sentences(50)}), tmp_path / "a.parquet")
    raw = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(raw[:-20])
    with pytest.raises(DataError, match=rf"b\.parquet \({len(raw) - 20} bytes\) is not a whole parquet file"):
        open_files("*.parquet")
    corpus = open_files("*.parquet", skip_bad=True)
    assert corpus.bad == {"unreadable file": 1} and len(texts_of(corpus)) == 50


def test_a_damaged_row_group_names_its_rows(open_files, tmp_path):
    table = pa.table({"text": sentences(60)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=20, compression="zstd", use_dictionary=False)
    group = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(1).column(0)
    with open(tmp_path / "a.parquet", "r+b") as file:
        file.seek(group.data_page_offset)
        file.write(bytes(group.total_compressed_size))
    with pytest.raises(DataError, match=r"a\.parquet: row group 1 \(row 20 on\)"):
        open_files("a.parquet")
    corpus = open_files("a.parquet", skip_bad=True)
    assert corpus.bad == {"unreadable row group": 1} and len(texts_of(corpus)) == 40


def test_a_token_beyond_the_vocabulary_names_line_and_position(open_files, tmp_path, tokenizer):
    texts = sentences(30)
    write_jsonl(tmp_path / "a.jsonl", texts)
    ids = [e.tolist() for e in encode(tokenizer, texts, 0)]
    limit = sorted({*itertools.chain(*ids)})[-3]
    said = rf"has 400 ids, more than model.vocab_size={limit}; use model.vocab_size=400 or more"
    with pytest.raises(ConfigError, match=said):
        open_files("a.jsonl", vocab_size=limit)
    corpus = open_files("a.jsonl", vocab_size=limit, skip_bad=True)
    line, row = next((number, row) for number, row in enumerate(ids, start=1) if max(row) >= limit)
    place, token = next((place, token) for place, token in enumerate(row) if token >= limit)
    assert f"a.jsonl:{line}, position {place}: token id {token}" in corpus.bad_records.first
    dropped = sum(max(row) >= limit for row in ids)
    assert corpus.bad == {"document with a token id beyond the vocabulary": dropped}
    assert corpus.train.documents.num_documents == 30 - dropped


@pytest.mark.parametrize(
    ("patterns", "changes", "said"),
    [
        ("nothing-*.txt", {}, r"data.paths: no file matches '.*nothing-\*.txt' .*{tmp_path}"),
        ("none", {}, r"data.paths: the folder .*none has no \.txt, \.jsonl, \.parquet file at any depth"),
        ("a.csv", {}, "a.csv; use files in .txt, .jsonl, .parquet"),
        ("empty.txt", {}, "the corpus is empty: no text in .*empty.txt$"),
        ("short.txt", {}, r"1 document with 3 tokens .*short.txt.* = 17; use data.seq_len=2 or less"),
        ("short.txt", {"tokenizer": None}, "data=files needs data.tokenizer"),
        ("short.txt", {"tokenizer": "no.json"}, "no.json does not exist"),
        ("short.txt", {"tokenizer": "a.csv"}, "a.csv is not a tokenizer.json"),
        ("short.txt", {"eod_token": "</s>"}, r"data.eod_token=</s> is not a token .* <\|endoftext\|>"),
        ("a.jsonl *.jsonl", {"weights": [1.0, 1.0]}, "names .*a.jsonl in two entries with a weight each"),
        ("a.jsonl short.txt", {"weights": [1.0, 1.0]},
         r"data.weights: .* 3 tokens in all \(out of \[.*short.txt\]\), but one"),
    ],
)  # fmt: skip
def test_wrong_configurations_say_what_to_type(open_files, tmp_path, monkeypatch, patterns, changes, said):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", sentences(60))
    (tmp_path / "none").mkdir()
    for name, text in (("a.csv", "{}"), ("empty.txt", ""), ("short.txt", "ab")):
        (tmp_path / name).write_text(text)
    with pytest.raises((ConfigError, DataError), match=said.replace("{tmp_path}", str(tmp_path))):
        open_files(*patterns.split(), **changes)


def test_a_folder_stands_for_the_text_in_it_and_below(open_files, tmp_path):
    for place, seed in (("set[1]/b.jsonl", 1), ("set[1]/deep/a.jsonl", 2), ("set[1]/.hidden/c.jsonl", 3)):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(tmp_path / place, sentences(5, seed))
    (tmp_path / "set[1]" / "README.md").write_text("no text to train on")
    assert texts_of(open_files("set[1]")) == [*sentences(5, 1), *sentences(5, 2)]


def test_a_second_run_reads_the_cache_and_a_changed_file_does_not(open_files, tmp_path, cache, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", sentences(9))
    open_files("a.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr("graphmoe.data.sources.files.tokenise_files", None)
        assert texts_of(open_files("a.jsonl", vocab_size=5000)) == sentences(9)
    write_jsonl(tmp_path / "a.jsonl", sentences(9, seed=1))
    assert texts_of(open_files("a.jsonl")) == sentences(9, seed=1)
    assert len(list(cache.glob("files-*/meta.json"))) == 2


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_a_match_that_is_no_regular_file_is_an_error(open_files, tmp_path, make):
    write_jsonl(tmp_path / "a.jsonl", sentences(9))
    (tmp_path / "c.jsonl").mkdir()
    open_files("*.jsonl")
    make(tmp_path / "b.jsonl")
    with pytest.raises(ConfigError, match=r"data.paths: \S*/b.jsonl is not a regular file"):
        open_files("*.jsonl")


def test_validation_files_are_left_out_of_training(open_files, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", sentences(20, 1))
    write_jsonl(tmp_path / "b.jsonl", sentences(20, 2))
    corpus = open_files("*.jsonl", val_paths=[str(tmp_path / "b.jsonl")])
    assert texts_of(corpus) == sentences(20, 1)
    assert corpus.val.documents.num_documents == 20 and corpus.counts["train_files"] == 1
    with pytest.raises(ConfigError, match="nothing is left to train on"):
        open_files("b.jsonl", val_paths=[str(tmp_path / "*.jsonl")])


def test_processes_give_the_same_bytes_as_none(tmp_path, tokenizer_path, tokenizer, monkeypatch):
    monkeypatch.setattr("graphmoe.data.text_files.PART_BYTES", 2000)
    files = [write_jsonl(tmp_path / f"{i}.jsonl", sentences(40, i)) for i in range(3)]
    recipe, done = Recipe(tokenizer_path, 0, "text", num_ids(tokenizer), False), []
    for name, workers in (("one", 1), ("two", 2)):
        tokenise_files(files, recipe, tmp_path / name, workers=workers, on_bytes=done.append)
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"one{ending}").read_bytes() == (tmp_path / f"two{ending}").read_bytes()
    assert sum(done) == 2 * sum(path.stat().st_size for path in files)
    assert len(read_token_file(tmp_path / "two").start_N) == 120
    assert not list(tmp_path.glob("*.tmp-*"))


def test_a_killed_build_leaves_no_process_and_the_next_one_removes_its_folder(tmp_path, tokenizer_path):
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", sentences(40))
    script = f"""
import time
from pathlib import Path
from graphmoe.data.tokenise import Recipe, tokenise_files

folder = Path({str(tmp_path)!r})
recipe = Recipe(Path({str(tokenizer_path)!r}), 0, "text", 400, False)
wait = lambda num_bytes: (print(flush=True), time.sleep(60))
tokenise_files(sorted(folder.glob("*.jsonl")), recipe, folder / "out", workers=2, on_bytes=wait)
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE) as build:
        assert build.stdout.readline() == b"\n"
        started = psutil.Process(build.pid).children(recursive=True)
        build.kill()
    assert len(started) >= 3  # a server of processes, and two
    assert psutil.wait_procs(started, timeout=10)[1] == []
    assert len(list(tmp_path.glob("out.bin.tmp-*"))) == 1
    recipe = Recipe(tokenizer_path, 0, "text", 400, False)
    tokenise_files(sorted(tmp_path.glob("*.jsonl")), recipe, tmp_path / "out", workers=1)
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.bin", "out.idx"]


def test_a_very_long_text_is_encoded_in_pieces_with_the_same_ids(tokenizer, monkeypatch):
    text = "\n".join(sentences(300)) + "\n\n  indented\n"
    whole = encode(tokenizer, [text], 0)[0]
    monkeypatch.setattr("graphmoe.data.tokenizer.LONG_TEXT_CHARS", 1000)
    monkeypatch.setattr("graphmoe.data.tokenizer.PIECE_CHARS", 100)
    assert np.array_equal(encode(tokenizer, [text], 0)[0], whole)


@pytest.mark.parametrize("fraction, warns", [(0.01, True), (0.5, False), (0.0, False)])
def test_a_document_mask_warns_if_validation_takes_the_end_tokens(
    open_files, tmp_path, caplog, fraction, warns
):
    write_jsonl(tmp_path / "a.jsonl", sentences(60, 1))
    open_files("a.jsonl", val_fraction=fraction, document_mask=True)
    said = [text for text in caplog.messages if "have no end token and are joined" in text]
    assert len(said) == warns and all("each of the 60 documents" in text for text in said)


def test_paths_of_any_kind_are_mixed_by_weights(open_files, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", sentences(60, 1))
    (tmp_path / "b.txt").write_text("\n".join(sentences(60, 2)), encoding="utf-8")
    pq.write_table(pa.table({"text": sentences(60, 3)}), tmp_path / "c.parquet")
    paths = ("a.jsonl", "b.txt", "c.parquet")
    alone = open_files(*paths, val_fraction=0.1)
    corpus = open_files(*paths, val_fraction=0.1, weights=[5.0, 1.0, 2.0])
    by_path = [{tuple(part.sample(i)) for i in range(part.num_samples)} for part in corpus.train.parts]
    drawn = [tuple(row) for row in corpus.train.reader().read(0, 1024)]
    assert [sum(row in found for row in drawn) for found in by_path] == [640, 128, 256]
    assert corpus.val.documents.num_documents == alone.val.documents.num_documents
    rows, _ = rows_over_ranks(corpus.train, prefetch=2)  # with resumes
    assert torch.equal(rows, torch.from_numpy(corpus.train.reader().read(0, len(rows))))
    assert corpus.counts["mix"].startswith(f"0.625 of {tmp_path}/a.jsonl (") and corpus.train.contents
