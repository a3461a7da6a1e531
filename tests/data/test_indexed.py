"""Megatron files against bytes laid out by hand, damaged ones, and data=memmap through open_data."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from graphmoe.config.schema import ConfigError, DataConfig
from graphmoe.data import open_data
from graphmoe.data.errors import DataError
from graphmoe.data.indexed import read_token_file, write_token_file

# Two sequences of 3 and 2 tokens in uint16, a document each: the layout as published readers take it.
GOLDEN_BIN = struct.pack("<5H", 11, 12, 13, 65535, 0)
GOLDEN_IDX = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ2i2q3q", 1, 8, 2, 3, *(3, 2), *(0, 6), *(0, 1, 2))


def golden(folder: Path) -> Path:
    (folder / "golden.bin").write_bytes(GOLDEN_BIN)
    (folder / "golden.idx").write_bytes(GOLDEN_IDX)
    return folder / "golden"


def documents_of(prefix) -> list[list[int]]:
    file = read_token_file(prefix)
    return [file.tokens_T[s : s + n].tolist() for s, n in zip(file.start_N, file.length_N, strict=True)]


def test_the_bytes_of_published_tools_are_read_and_written(tmp_path):
    assert documents_of(golden(tmp_path)) == [[11, 12, 13], [65535, 0]]
    write_token_file(tmp_path / "own", [[11, 12, 13], [65535, 0]], np.uint16)
    assert (tmp_path / "own.bin").read_bytes() == GOLDEN_BIN
    assert (tmp_path / "own.idx").read_bytes() == GOLDEN_IDX


def test_every_integer_type_is_read(tmp_path):
    for code, letter in ((1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")):
        (tmp_path / "t.bin").write_bytes(struct.pack(f"<3{letter}", 5, 6, 7))
        header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 2, 3)
        places = struct.pack("<2i2q3q", *(1, 2), *(0, struct.calcsize(letter)), *(0, 1, 2))
        (tmp_path / "t.idx").write_bytes(header + places)
        assert documents_of(tmp_path / "t") == [[5], [6, 7]]


def patched(offset: int, kind: str, value: int) -> bytes:
    raw = bytearray(GOLDEN_IDX)
    struct.pack_into(kind, raw, offset, value)
    return bytes(raw)


@pytest.mark.parametrize(
    ("ending", "content", "said"),
    [(".idx", GOLDEN_IDX[:n], rf"\b{n} bytes.*truncated") for n in (0, 10, 33, 34, 60, len(GOLDEN_IDX) - 1)]
    + [(".bin", GOLDEN_BIN[:n].ljust(n), rf"has {n} bytes.*= 10 bytes") for n in (0, 9, 12)]
    + [(".idx", b"PARQUET" + GOLDEN_IDX[7:], "not a Megatron index")]
    + [(".idx", patched(9, "<Q", 2), "version 2"), (".idx", patched(50, "<q", 4), "positions")]
    + [(".idx", patched(17, "B", code), f"dtype code {code}") for code in (7, 99)]
    + [(".idx", patched(*at), "not in order") for at in ((58, "<q", 1), (66, "<q", 9))]
    + [(".idx", patched(34, "<i", -3), "out of order|not in order")],
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, ending, content, said):
    golden(tmp_path).with_suffix(ending).write_bytes(content)
    with pytest.raises(DataError, match=said) as error:
        read_token_file(tmp_path / "golden")
    assert f"golden{ending}" in str(error.value)


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_half_that_is_gone_or_no_file_is_an_error_that_names_it(tmp_path, ending):
    path = golden(tmp_path).with_suffix(ending)
    path.unlink()
    with pytest.raises(DataError, match=rf"golden\{ending} does not exist"):
        read_token_file(tmp_path / "golden")
    os.mkfifo(path)
    with pytest.raises(DataError, match=rf"golden\{ending} is not a regular file"):
        read_token_file(tmp_path / "golden")


@pytest.fixture
def open_memmap(tmp_path):
    for number, name in enumerate("ab"):
        write_token_file(tmp_path / name, [np.arange(20) + 100 * number] * 30, np.uint16)

    def open_memmap(*names, **changes):
        config = DataConfig(source="memmap", paths=[str(tmp_path / name) for name in names], **changes)
        return open_data(config, seq_len=10, vocab_size=1000)

    return open_memmap


@pytest.mark.parametrize("names", [("a", "b"), ("a.bin", "b.idx"), ("*",), ("a", "?", "b")])
def test_prefixes_endings_and_globs_name_the_same_pairs(open_memmap, names):
    corpus = open_memmap(*names)
    wanted = {"train_files": 2, "train_documents": 57, "val_documents": 3, "train_tokens": 57 * 20}
    assert wanted.items() <= corpus.counts.items() and corpus.tokenizer is None
    rows = corpus.train.reader().read(0, corpus.train.num_samples)
    assert {*np.unique(rows)} == {*range(20), *range(100, 120)}


@pytest.mark.parametrize("skip_bad", [False, True])
def test_wrong_prefixes_say_what_was_looked_for(open_memmap, skip_bad):
    for names, said in {
        (): "data=memmap needs data.paths",
        ("no-*",): r"data.paths: no file matches '.*no-\*.idx'",
        ("a", "nothing"): r"data.paths: \S*/nothing.idx does not exist",
    }.items():
        with pytest.raises(ConfigError, match=said) as caught:
            open_memmap(*names, skip_bad=skip_bad)
        assert "skip_bad" not in str(caught.value)


@pytest.mark.parametrize("last", [0, 7])
def test_a_document_mask_needs_the_end_token_of_the_tokenizer_in_the_files(tmp_path, tokenizer_path, last):
    write_token_file(tmp_path / "a", [[*range(1, 20), last]] * 30, np.uint16)
    named = {"source": "memmap", "paths": [str(tmp_path / "a")], "tokenizer": str(tokenizer_path)}
    sizes, wanted = {"seq_len": 10, "vocab_size": 400}, DataConfig(**named, document_mask=True)
    assert open_data(DataConfig(**named), **sizes).end_token is None
    if last == 0:
        assert open_data(wanted, **sizes).end_token == 0
        return
    with pytest.raises(ConfigError, match=r"needs token 0 .* first of \S*a.bin ends with token 7; set"):
        open_data(wanted, **sizes)


def test_a_file_that_becomes_shorter_while_it_is_mapped_is_named_before_it_is_read(tmp_path):
    write_token_file(tmp_path / "t", [range(100_000)] * 3, np.int32)
    config = DataConfig(source="memmap", paths=[str(tmp_path / "t")], val_fraction=0.0)
    samples = open_data(config, seq_len=64, vocab_size=200_000).train
    assert len(samples.sample(0)) == 65
    with open(tmp_path / "t.bin", "r+b") as file:
        file.truncate(5000)
    with pytest.raises(DataError, match=r"t\.bin was truncated .*: it has 5000 bytes, and had 1200000"):
        samples.sample(1)
    (tmp_path / "t.bin").unlink()
    assert len(read_token_file(golden(tmp_path)).tokens_T) == 5
