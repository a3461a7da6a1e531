"""Conversations as token ids with flags: rows, which tokens have a loss, and what is too long."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding

from graphmoe.config.schema import TooLong, TrainOn
from graphmoe.config.token_flags import NO_LABEL, START
from graphmoe.data.chat_template import ChatTemplate, Renderer, Spans, TemplateFault
from graphmoe.data.errors import BadRecords
from graphmoe.data.text_files import Part, is_text, read_records
from graphmoe.data.tokenise import BATCH_CHARS, Recipe, batches
from graphmoe.data.tokenizer import load_tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = ("messages", "prompt", "completion", "text", "tools")
KEPT, TOO_LONG, NO_LOSS = "conversations", "too_long", "without_loss"  # names of counts
TOKENS, TRAINED = "tokens", "trained_tokens"
_FORMS = "messages (a list of {role, content}), prompt and completion (texts, or lists of messages), or text"

Message = dict[str, Any]


class Turns(NamedTuple):
    """Messages for the template, and indices of those with a loss, or with ``inverted`` those without."""

    messages: list[Message]
    wanted: list[int]
    tools: Any
    inverted: bool


class Plain(NamedTuple):
    """A text without a template, with a loss from character ``first``; an end token follows."""

    text: str
    first: int


class _Row(NamedTuple):
    place: object
    text: str
    spans: Spans  # characters with a loss
    ends: bool


@dataclass(frozen=True, kw_only=True)
class ChatRecipe(Recipe):
    template: ChatTemplate
    train_on: TrainOn
    too_long: TooLong
    most_tokens: int  # of a conversation

    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.int32)  # for the flags

    def documents(self, part: Part, bad: BadRecords, notes: Counter[str]) -> Iterator[npt.NDArray[Any]]:
        """Yield ids with flags (graphmoe.config.token_flags) of each conversation that has a loss."""
        tokenizer = load_tokenizer(self.tokenizer_path)
        for batch in batches(self._rows(part, bad), BATCH_CHARS):
            found = tokenizer.encode_batch([row.text for row in batch], add_special_tokens=False)
            for row, encoding in zip(batch, found, strict=True):
                ids_T = self._flagged(row, encoding)
                token_T = np.asarray(encoding.ids)
                if token_T.max(initial=0) >= self.id_limit:
                    at = int(np.argmax(token_T >= self.id_limit))
                    bad.report_id(
                        "conversation", f"{row.place}, position {at}", int(token_T[at]), self.id_limit
                    )
                    continue
                if is_long := len(ids_T) > self.most_tokens:
                    notes[TOO_LONG] += 1
                    ids_T = ids_T[: self.most_tokens]
                trained = int(((ids_T & NO_LABEL) == 0).sum())
                if is_long and self.too_long is TooLong.skip:
                    continue
                if not trained:
                    notes[NO_LOSS] += 1
                    continue
                notes.update({KEPT: 1, TOKENS: len(ids_T), TRAINED: trained})
                yield ids_T

    def _rows(self, part: Part, bad: BadRecords) -> Iterator[_Row]:
        with closing(Renderer(self.template)) as render:
            for place, record in read_records(part, FIELDS, bad):
                try:
                    row = self._row(place, read_row(record, self.train_on), render)
                except ValueError as error:
                    bad.report("row of another form", f"{place}: {error}; valid is {_FORMS}")
                except TemplateFault as error:
                    bad.report("conversation that the template refuses", f"{place}: {error}")
                else:
                    if is_text(row.text, "text", place, bad):
                        yield row

    def _row(self, place: object, found: Turns | Plain, render: Renderer) -> _Row:
        if isinstance(found, Plain):
            if self.end_token is None:
                raise ValueError("a text, and the tokenizer names no end token for it: set data.eod_token")
            return _Row(place, found.text, [(found.first, len(found.text))], True)
        messages, wanted, tools, inverted = found
        text, spans = render(messages, tools, wanted)
        if inverted:
            edges = [0, *(edge for span in spans for edge in span), len(text)]
            spans = [*zip(edges[::2], edges[1::2], strict=True)]
        return _Row(place, text, spans, False)

    def _flagged(self, row: _Row, encoding: Encoding) -> npt.NDArray[np.int64]:
        ids_T = np.asarray(encoding.ids, dtype=np.int64)
        first_T, last_T = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        has_loss_T = np.zeros(len(ids_T), dtype=np.bool_)
        for start, stop in row.spans:
            has_loss_T |= (first_T < stop) & (last_T > start)
            # byte-level tokenizers trim blanks from offsets: a token of blanks is empty, at its end
            has_loss_T |= (first_T == last_T) & (first_T == stop) & (stop > start)
        end = self.end_token
        if row.ends and end is not None and (not len(ids_T) or ids_T[-1] != end):
            ids_T, has_loss_T = np.append(ids_T, end), np.append(has_loss_T, True)
        has_loss_T[:1] = False  # no token of the conversation predicts its first one
        ids_T = np.where(has_loss_T, ids_T, ids_T | NO_LABEL)
        ids_T[:1] |= START
        return ids_T


def read_row(record: dict[str, Any], train_on: TrainOn) -> Turns | Plain:
    """Return what a row has: messages, else prompt and completion, else text. *Raises* ValueError."""
    there = {name: value for name, value in record.items() if value is not None}
    if "messages" in there:
        return _turns(_messages(there["messages"], "messages"), there, train_on)
    if "prompt" in there and "completion" in there:
        prompt, completion = there["prompt"], there["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return Plain(prompt + completion, 0 if train_on is TrainOn.all else len(prompt))
        asked, answers = _messages(prompt, "prompt"), _messages(completion, "completion")
        if train_on is not TrainOn.all:
            asked = [message | {"train": False} for message in asked]
            answers = [{"train": message["role"] == "assistant"} | message for message in answers]
        return _turns([*asked, *answers], there, train_on)
    if isinstance(there.get("text"), str):
        return Plain(there["text"], 0)
    names = ", ".join(f"{name} ({type(value).__name__})" for name, value in [*there.items()][:10])
    raise ValueError(f"a row with {names or 'no values'}")


def _turns(messages: list[Message], there: dict[str, Any], train_on: TrainOn) -> Turns:
    tools = there.get("tools")
    if isinstance(tools, str):  # the form of datasets whose tools differ in their fields
        try:
            tools = json.loads(tools)
        except ValueError:
            raise ValueError("tools is a text that is not JSON") from None
    if not isinstance(tools, list | None):
        raise ValueError(f"tools is {type(tools).__name__}, not a list")
    chosen = {
        TrainOn.assistant: lambda message: (
            message["role"] == "assistant" and message.get("train") is not False
        ),
        TrainOn.field: lambda message: message.get("train") is True,
        TrainOn.all: lambda message: message.get("train") is False,
    }[train_on]
    wanted = [index for index, message in enumerate(messages) if chosen(message)]
    shown = [{name: value for name, value in message.items() if name != "train"} for message in messages]
    return Turns(shown, wanted, tools, train_on is TrainOn.all)


def _messages(found: Any, name: str) -> list[Message]:
    if not isinstance(found, list) or not found:
        what = "an empty list" if found == [] else type(found).__name__
        raise ValueError(f"{name} is {what}, not a list of messages")
    return [_message(message, f"message {number} of {name}") for number, message in enumerate(found, 1)]


def _message(message: Any, name: str) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"{name} is {type(message).__name__}, not {{role, content}}")
    message = {key: value for key, value in message.items() if value is not None}  # as transformers
    role, content = message.get("role"), message.get("content", "")
    if role not in ROLES:
        raise ValueError(f"{name} has the role {str(role)[:40]!r}, not one of {', '.join(ROLES)}")
    if not isinstance(content, str | list) or {*message} <= {"role", "train"}:
        what = type(content).__name__ if "content" in message else "no"
        raise ValueError(f"{name} has {what} content, not a text or a list of parts")
    if not isinstance(message.get("train", True), bool):
        raise ValueError(f"{name} has train={str(message['train'])[:40]}, not true or false")
    return message
