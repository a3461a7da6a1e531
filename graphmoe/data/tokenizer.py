"""Loading and training of tokenizers, and the end-of-document token."""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from graphmoe.config.arguments import near_path
from graphmoe.config.schema import ConfigError
from graphmoe.config.untrusted import FileError, read_json
from graphmoe.data.errors import one_line

END_OF_TEXT = "<|endoftext|>"
# Names of the end token in published tokenizers, in the order in which they are looked for.
DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", DEEPSEEK_END, "[EOD]", "[EOS]", "</s>", "<eos>")
TRAINED_END = 0  # id of the end token of a tokenizer that `train_bpe` trains
FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # keys of a published config.json
# the tokenizers library takes time for each id below the largest: 10 s for 1e9, several times
LARGEST_ID = 2**24 - 1
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
LONG_TEXT_CHARS = 4_000_000
PIECE_CHARS = 1_000_000


def find_tokenizer(name: str | Path, key: str = "data.tokenizer", *, fetch: bool = True) -> Path:
    """Return the ``tokenizer.json`` of a path, a folder, or a Hugging Face hub name.

    Hub files come from the local cache, or with ``fetch`` from the network. *Raises* ConfigError if neither
    has the name.
    """
    path = tokenizer_file(name)
    if path.exists() or not _HUB_NAME.fullmatch(str(name)) or path.suffix == ".json":
        return path
    import huggingface_hub as hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def get(file: str, *, local: bool) -> Path:
        return Path(hub.hf_hub_download(str(name), file, local_files_only=local))

    try:
        with contextlib.suppress(LocalEntryNotFoundError):
            return get(FILE, local=True)
        if not fetch:
            return path
        reach_hub(str(name), FILE)
        found = get(FILE, local=False)
    except Exception as error:  # of any type: from library, hub and network
        raise ConfigError(
            f"{key}={name} is not a file here, and the Hugging Face hub did not provide its {FILE} "
            f"({one_line(error)[:200]}); give the path of one, or fetch it where there is a network"
            f"{near_path(name)}"
        ) from error
    for optional in ("tokenizer_config.json", TEMPLATE_FILE):  # the end-of-document token, the chat template
        with contextlib.suppress(Exception):
            get(optional, local=False)
    return found


def reach_hub(name: str, file: str, kind: str = "model") -> None:
    """Raise an error at once if the hub is unreachable; its library would retry for half a minute."""
    import huggingface_hub as hub

    hub.get_session().head(hub.hf_hub_url(name, file, repo_type=kind), timeout=10)


def load_tokenizer(path: str | Path, key: str = "data.tokenizer") -> Tokenizer:
    path = tokenizer_file(path)
    if not path.is_file():
        why = "is not a regular file" if path.exists() else "does not exist"
        raise ConfigError(
            f"{key}={path} {why}; give the path of a Hugging Face tokenizer.json{near_path(path)}"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
        largest = num_ids(tokenizer) - 1
    except Exception as error:  # the Rust side raises bare Exception
        raise ConfigError(f"{key}={path} is not a tokenizer.json: {one_line(error)}") from error
    if largest > LARGEST_ID:
        raise ConfigError(f"{key}={path} has the token id {largest}; ids up to {LARGEST_ID} are supported")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenizer_file(path: str | Path) -> Path:
    path = Path(os.path.expanduser(path))
    return path / FILE if path.is_dir() else path


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    return hashlib.blake2b(tokenizer.to_str().encode(), digest_size=16).hexdigest()


def num_ids(tokenizer: Tokenizer) -> int:
    """Return the largest id of the tokenizer plus one."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def end_of_document(
    tokenizer: Tokenizer, path: str | Path, name: str | None, key: str = "data.eod_token"
) -> int:
    """Return the id of ``name``, or of the end token declared by the tokenizer's files.

    *Raises* ConfigError that lists the special tokens if there is no such token.
    """
    if name is not None:
        token = tokenizer.token_to_id(name)
        if token is None:
            raise ConfigError(f"{key}={name} is not a token of {path}; {_special_tokens(tokenizer)}")
        return int(token)
    token = usual_end(tokenizer, path)
    if token is None:
        raise ConfigError(
            f"cannot tell which token of {path} ends a document; {_special_tokens(tokenizer)}; set "
            f"{key}=... to one that the text does not have, or train it with special_tokens=['<|endoftext|>']"
        )
    return token


def usual_end(tokenizer: Tokenizer, path: str | Path) -> int | None:
    """Return the id of the declared end token, or of one with a usual name; else None."""
    declared = _declared_end(tokenizer_file(path).with_name("tokenizer_config.json"))
    for candidate in (declared, *END_NAMES):
        token = None if candidate is None else tokenizer.token_to_id(candidate)
        if token is not None:
            return int(token)
    return None


def train_bpe(texts: Iterator[str], vocab_size: int, length: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer of at most ``vocab_size`` ids; `TRAINED_END` ends a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer, length=length)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str], end: int | None) -> list[npt.NDArray[np.int64]]:
    """Return token ids of each text, followed by ``end``. Uses all cores by default."""
    # long texts are encoded in pieces, which bounds memory: the tokenizer needs about 100 bytes per token
    pieces = [list(_pieces(text)) for text in texts]
    encoded = tokenizer.encode_batch_fast([p for group in pieces for p in group], add_special_tokens=False)
    ids = iter(encoded)
    tail = np.asarray([] if end is None else [end], dtype=np.int64)
    return [
        np.concatenate([*(np.asarray(next(ids).ids, dtype=np.int64) for _ in group), tail])
        for group in pieces
    ]


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > LONG_TEXT_CHARS:
        cut = start + PIECE_CHARS
        while True:
            cut = text.find("\n", cut) + 1
            if cut == 0 or cut == len(text) or not text[cut].isspace():
                break
        if cut in (0, len(text)):
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


class _Token(TypedDict):
    content: str


class _TokenizerConfig(TypedDict):
    eos_token: NotRequired[str | _Token | None]


def _declared_end(config_path: Path) -> str | None:
    if not config_path.exists():
        return None
    declared = read_json(config_path, _TokenizerConfig).get("eos_token")
    name = declared["content"] if isinstance(declared, dict) else declared
    try:
        (name or "").encode()
    except UnicodeEncodeError as error:
        raise FileError(f"{config_path}: eos_token: {name!r:.80} is not text ({error.reason})") from error
    return name


def _special_tokens(tokenizer: Tokenizer) -> str:
    names = [t.content for _, t in sorted(tokenizer.get_added_tokens_decoder().items()) if t.special]
    return f"its special tokens: {', '.join(names[:20]) or 'none'}"
