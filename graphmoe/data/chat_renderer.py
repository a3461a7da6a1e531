"""Process that renders conversations by a chat template; it imports only jinja2 and Python's own library.

A template is a stranger's program. The sandbox refuses attributes that lead to Python's internals. Limits of
the process do what a sandbox cannot: they end endless loops, bound memory, and leave no file or socket to
open. `graphmoe.data.chat_template` starts this file. Each line of stdin is a JSON object, answered by one on
stdout.
"""

import codecs
import json
import pprint
import signal
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import jinja2.constants
import jinja2.debug
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARS = 4_000_000  # of a rendered conversation
MAX_BLOCKS = 100_000  # generation blocks of a conversation
MAX_BYTES = 1 << 30  # of memory beyond what the process has at its start
MAX_CPU_S = 10.0  # of processor time for a conversation
# imported late by jinja2 and Python, which the limit of open files would prevent
_IMPORTED = jinja2.constants, jinja2.debug, pprint, textwrap, unicodedata, codecs.lookup("unicode-escape")
_REASONING = "reasoning_content", "thinking", "reasoning"

Message = dict[str, Any]
Span = tuple[int, int]  # first character, and the one after the last


class _Generation(jinja2.ext.Extension):
    """Blocks around what the model says; it notes their spans."""

    tags = {"generation"}
    used = False  # by the template
    num_chars = 0  # rendered so far
    spans: list[Span]
    texts: list[str]  # of the spans

    def parse(self, parser: Parser) -> nodes.Node:
        self.used, line = True, next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        text = caller()
        self.spans.append((self.num_chars, self.num_chars + len(text)))
        self.texts.append(text)
        if len(self.spans) > MAX_BLOCKS:
            raise TemplateError(f"it has more than {MAX_BLOCKS:,} generation blocks in a conversation")
        return text


class _Namespace(Namespace):
    def __init__(*args: Any, **values: Any) -> None:  # as jinja2's: a value may be named self
        self, *rest = args
        Namespace.__init__(self, *rest, **values)
        for name in dict(*rest, **values):
            _refuse_hidden(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_hidden(name)
        super().__setitem__(name, value)


def _refuse_hidden(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name}")


class Template:
    """A compiled chat template. *Raises* jinja2's errors, of compiling and of rendering."""

    def __init__(self, source: str, variables: dict[str, str], specials: Sequence[str] = ()) -> None:
        """``variables``: special tokens by name; ``specials``: texts of all special tokens."""
        # settings, filters and globals are those that templates are written for, those of transformers
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now, "namespace": _Namespace}
        environment.globals["dict"] = lambda *args, **values: dict(*args, **values)
        self._template = environment.from_string(source)
        generation = environment.extensions[_Generation.identifier]
        assert isinstance(generation, _Generation)
        self._generation, self._variables, self._specials = generation, variables, (*filter(None, specials),)

    def render(
        self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the text, and spans of its generation blocks; ``prompt`` adds the head of an answer."""
        generation, parts = self._generation, list[str]()
        generation.num_chars, generation.spans, generation.texts = 0, [], []
        names = {"messages": [*map(_with_reasoning, messages)], "tools": tools, "documents": None}
        for part in self._template.generate(**self._variables | names, add_generation_prompt=prompt):
            parts.append(part)
            generation.num_chars += len(part)
            if generation.num_chars > MAX_CHARS:
                raise TemplateError(f"it makes more than {MAX_CHARS:,} characters of a conversation")
        text = "".join(parts)
        for (start, stop), block in zip(generation.spans, generation.texts, strict=True):
            if text[start:stop] != block:  # of text that a macro, a set block or a filter held back
                raise TemplateError("generation blocks in macros, set blocks or filters have no position")
        return text, generation.spans

    def spans(self, messages: Sequence[Message], tools: Any, wanted: Sequence[int]) -> tuple[str, list[Span]]:
        """Return the text, and the span of each wanted message, by its index.

        Answers have their generation blocks. Without blocks a message is what the text has more than that
        of the messages before it. *Raises* TemplateError if those are not its beginning.
        """
        text, blocks = self.render(messages, tools)
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if self._generation.used and [*wanted] == answers:
            return text, blocks
        if self._generation.used and len(blocks) == len(answers) and {*wanted} <= {*answers}:
            return text, [blocks[answers.index(index)] for index in wanted]
        return text, [self._span(messages, tools, index, text) for index in wanted]

    def _span(self, messages: Sequence[Message], tools: Any, index: int, text: str) -> Span:
        is_answer = messages[index]["role"] == "assistant"
        before = ""
        if index or is_answer:
            before, _ = self.render(messages[:index], tools, prompt=is_answer)
        after = text if index + 1 == len(messages) else self.render(messages[: index + 1], tools)[0]
        remedy = "use a template with {% generation %} around answers (data.chat_template=FILE)"
        if not after.startswith(before):
            what = "the head of an answer" if is_answer else "the messages before it"
            raise TemplateError(
                f"message {index + 1} is rendered without {what} at its beginning, so its tokens are not "
                f"known; {remedy}, or data.train_on=all"
            )
        if not text.startswith(after):
            raise TemplateError(
                f"message {index + 1} is rendered in another way if messages follow, so its tokens are not "
                f"known; {remedy}, end the conversation with it, or set its field train to false"
            )
        whole = after.rstrip()
        # no model has to learn the line break after the token that ends its turn
        if len(whole) > len(before) and whole.endswith(self._specials):
            after = whole
        return len(before), len(after)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: object) -> None:
    raise TemplateError(str(message))


def _now(form: str, now: datetime = datetime.now()) -> str:  # noqa: B008  # one date for all renderings
    return now.strftime(form)


def _with_reasoning(message: Message) -> Message:
    found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _limit() -> None:
    import resource

    _now("%c %Z")  # reads the time zone
    limits = {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NOFILE: 3}
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            limits[resource.RLIMIT_AS] = int(file.read().split()[0]) * resource.getpagesize() + MAX_BYTES
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


def _start_clock() -> None:
    # without a handler the signal ends the process, also within a long call of C code
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)


def _serve() -> None:
    template: Template | None = None
    _limit()
    for line in sys.stdin.buffer:
        asked, answer = json.loads(line), dict[str, Any]()
        _start_clock()
        try:
            if template is None:
                template = Template(**asked)
            else:
                answer["text"], answer["spans"] = template.spans(**asked)
        except Exception as error:  # of any type: the template's program raised it
            name = "" if type(error) is TemplateError else f"{type(error).__name__}: "
            answer = {"error": f"{name}{error}"[:500].removesuffix(": ")}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
