"""Python's standard library as a source, with a tokenizer trained on it."""

import hashlib
import logging
import os
import platform
import sysconfig
import time
import tokenize
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from graphmoe.config.progress import working
from graphmoe.config.schema import ConfigError, DataConfig
from graphmoe.data.cache import cache_folder, cache_key, cached
from graphmoe.data.contents import entry_damage, read_entry_file
from graphmoe.data.corpus import Corpus, configured_tokenizer, pack_corpus
from graphmoe.data.errors import BadRecords
from graphmoe.data.indexed import smallest_dtype, write_token_file
from graphmoe.data.samples import Documents, held_out
from graphmoe.data.tokenizer import TRAINED_END, encode, load_tokenizer, num_ids, tokenizer_hash, train_bpe

log = logging.getLogger(__name__)

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
LEFT_OUT |= {"encodings", "lib2to3"}
"""Names of folders to skip: outside the library, or of tables rather than text."""
MIN_FILES = 2


def open_corpus(config: DataConfig, seq_len: int, vocab_size: int, root: Path | None = None) -> Corpus:
    """Open the corpus of Python's standard library, or of .py files under ``root``.

    Each file is a document. Without a tokenizer one is trained on the training files. The cache entry has
    tokenizer.json, train.bin/.idx and, if any, val.bin/.idx.
    """
    tokenizer, end, size = None, None, config.trained_size(vocab_size)
    if config.tokenizer is not None:
        tokenizer, end = configured_tokenizer(config, vocab_size)
    elif not 300 <= size <= vocab_size:
        raise ConfigError(f"data.bpe_vocab_size={size} is not in 300 .. model.vocab_size={vocab_size}")
    files = find_sources(root or Path(sysconfig.get_path("stdlib")))
    contents = hashlib.blake2b(digest_size=16)
    for name, raw in files.items():
        contents.update(f"{name}\0{len(raw)}\0".encode())
        contents.update(raw)
    how = tokenizer_hash(tokenizer) if tokenizer else size
    key = cache_key("stdlib", contents.hexdigest(), config.val_fraction, how, end)

    def build(folder: Path) -> dict[str, Any]:
        with working("tokenising the standard library"):
            return _build(folder, files, config, tokenizer or size, end)

    entry, counts = cached(cache_folder(config.cache_dir), f"stdlib-{key}", build, dict[str, int])
    with entry_damage(entry):
        tokenizer = load_tokenizer(entry / "tokenizer.json")
    train = Documents.from_files([read_entry_file(entry, "train")])
    val = Documents.from_files([read_entry_file(entry, "val")]) if "val_files" in counts else None
    corpus = pack_corpus(config, seq_len, train, val, tokenizer, BadRecords(config.skip_bad), vocab_size)
    corpus.counts.update(counts, cache=str(entry))
    corpus.end_token = TRAINED_END if end is None else end
    return corpus


def find_sources(root: Path) -> dict[str, bytes]:
    """Return .py files under ``root`` by relative path, without tests, installed packages and tables."""
    files = {}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT]
        for name in names:
            path = Path(folder, name)
            if name.endswith(".py") and path.is_file():
                files[path.relative_to(root).as_posix()] = path.read_bytes()
    if len(files) < MIN_FILES:
        raise ConfigError(
            f"data=stdlib: {root} holds {len(files)} .py files; this Python {platform.python_version()} "
            "is installed without its library's source. Use data=files data.paths=[...] data.tokenizer=..."
        )
    return dict(sorted(files.items()))


def _build(
    folder: Path, files: dict[str, bytes], config: DataConfig, tokenizer: Tokenizer | int, end: int | None
) -> dict[str, Any]:
    started = time.monotonic()
    texts = {name: text for name, raw in files.items() if (text := _decode(name, raw))}
    hashes = [int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") for name in texts]
    # by a hash of their names, so the split does not depend on the seed
    val = held_out(np.array(hashes, dtype=np.uint64), config.val_fraction)
    sides = {"train": False, "val": True} if val.any() else {"train": False}
    parts = {
        name: [text for text, held in zip(texts.values(), val, strict=True) if held == side]
        for name, side in sides.items()
    }
    log.info("standard library: %d files, %d characters", len(texts), sum(map(len, texts.values())))
    if isinstance(tokenizer, int):
        tokenizer = train_bpe(iter(parts["train"]), tokenizer, len(parts["train"]))
        end = TRAINED_END
        seconds = time.monotonic() - started
        log.info("trained a byte-level BPE tokenizer of %d ids, %.1f s", num_ids(tokenizer), seconds)
    # not tokenizer.save: the Rust side raises bare Exception when the disk is full
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    dtype = smallest_dtype(num_ids(tokenizer))
    counts: dict[str, Any] = {"files_left_out": len(files) - len(texts)}
    for name, part in parts.items():
        documents = encode(tokenizer, part, end)
        write_token_file(folder / name, documents, dtype)
        counts[f"{name}_files"] = len(documents)
        counts[f"{name}_characters"] = sum(map(len, part))
    log.info("tokenised the standard library, %.1f s in all", time.monotonic() - started)
    return counts


def _decode(name: str, raw: bytes) -> str:
    lines = iter(raw.splitlines(keepends=True))
    try:
        encoding, _ = tokenize.detect_encoding(lambda: next(lines, b""))
        return raw.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        log.warning("standard library: left out %s (%s)", name, error)
        return ""
