"""The chat template of a tokenizer, rendered in a process of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from graphmoe.config.schema import ConfigError, DataConfig
from graphmoe.config.untrusted import read_json, read_text
from graphmoe.data import chat_renderer
from graphmoe.data.errors import one_line
from graphmoe.data.tokenizer import TEMPLATE_FILE, tokenizer_file

_VARIABLES = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "TZ")
_NAMES = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]

Spans = list[tuple[int, int]]


class TemplateFault(Exception):
    """A conversation that the template does not render; the message says why."""


class ChatTemplate(NamedTuple):
    """Source of a template, and what it reads beside the messages."""

    path: Path
    source: str
    variables: dict[str, str]
    """Special tokens by name, such as eos_token."""
    specials: list[str]
    """Texts of the tokenizer's special tokens."""


def chat_template(config: DataConfig, tokenizer: Tokenizer) -> ChatTemplate:
    """Return data.chat_template, else that beside the tokenizer. *Raises* ConfigError if there is none."""
    assert config.tokenizer is not None
    beside = tokenizer_file(config.tokenizer)
    declared = _read(beside.with_name("tokenizer_config.json"))
    names = _read(beside.with_name("special_tokens_map.json")) | declared
    variables = {name: text for name in _NAMES if (text := _text_of(names.get(name))) is not None}
    specials = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    path = beside.with_name(TEMPLATE_FILE)
    if config.chat_template is not None:
        path = Path(os.path.expanduser(config.chat_template))
        if not path.is_file():
            raise ConfigError(f"data.chat_template={path} is not a file; give a Jinja template")
    if path.is_file():
        return ChatTemplate(path, read_text(path, chat_renderer.MAX_CHARS), variables, specials)
    path, found = beside.with_name("tokenizer_config.json"), declared.get("chat_template")
    if isinstance(found, list):
        named = {row.get("name"): row.get("template") for row in found if isinstance(row, dict)}
        found = named.get("default")
        if found is None:
            raise ConfigError(
                f"{path} has the chat templates {', '.join(map(str, named)) or 'none'}, and none is named "
                f"default; write one of them to a file, and set data.chat_template=FILE"
            )
    if not isinstance(found, str):
        raise ConfigError(
            f"data.tokenizer={config.tokenizer} has no chat template: neither {TEMPLATE_FILE} nor a text "
            f"chat_template in tokenizer_config.json; set data.chat_template=FILE"
        )
    return ChatTemplate(path, found, variables, specials)


class Renderer:
    """Renders conversations in a process of its own, which limits what a template can do."""

    def __init__(self, template: ChatTemplate) -> None:
        """*Raises* ConfigError if the template does not compile."""
        self._template = template
        try:
            self._start()
        except TemplateFault as error:
            self.close()
            raise ConfigError(
                f"the chat template of {template.path} cannot be used: {error}; set data.chat_template=FILE"
            ) from error

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __call__(
        self, messages: Sequence[dict[str, Any]], tools: Any, wanted: Sequence[int]
    ) -> tuple[str, Spans]:
        """Return the text, and the span of each wanted message. *Raises* TemplateFault."""
        if self._process.poll() is not None:  # the conversation before this one ended it
            self._start()
        answer = self._ask({"messages": messages, "tools": tools, "wanted": wanted})
        return answer["text"], [(first, last) for first, last in answer["spans"]]

    def _start(self) -> None:
        _, *values = self._template
        self._process = subprocess.Popen(
            [sys.executable, "-P", chat_renderer.__file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        )  # fmt: skip
        self._ask(dict(zip(("source", "variables", "specials"), values, strict=True)))

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process.stdin and process.stdout
        # other values, such as dates of a parquet file, are names of their types, as in transformers
        line = json.dumps(question, default=lambda value: f"<{type(value).__name__}>")
        try:
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(process.stdout.readline())
        except (BrokenPipeError, ValueError) as error:  # no answer, or the beginning of one
            self.close()
            if process.returncode == -signal.SIGPROF:
                why = f"it takes more than {chat_renderer.MAX_CPU_S:g} s of a processor for a conversation"
            else:
                why = f"its process ended with the status {process.returncode}"
            raise TemplateFault(why) from error
        if "error" in answer:
            raise TemplateFault(one_line(answer["error"]))
        return answer


def _read(path: Path) -> dict[str, Any]:
    return read_json(path, dict[str, Any]) if path.exists() else {}


def _text_of(token: Any) -> str | None:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None
