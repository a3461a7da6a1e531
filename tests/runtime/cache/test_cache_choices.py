"""Answers that processes agree on."""

import errno
import multiprocessing
import os
from pathlib import Path

from graphmoe.runtime.cache.store import CompileCache
from tests.runtime.cache.cache_contents import FACTS


def test_the_first_answer_that_is_remembered_holds(cache):
    assert cache.recall("fastest", FACTS) is None
    assert cache.remember("fastest", FACTS, {"choice": "one"}) == {"choice": "one"}
    assert cache.remember("fastest", FACTS, {"choice": "two"}) == {"choice": "one"}
    assert cache.recall("fastest", FACTS | {"more": 1}) is None and cache.recall("other", FACTS) is None
    assert len(list((cache.folder / "choices").iterdir())) == 1


def remember(folder: Path, number: int, answers) -> None:
    answers.put(CompileCache(folder).remember("fastest", FACTS, number))


def test_processes_that_remember_at_the_same_time_agree(cache):
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    children = [context.Process(target=remember, args=(cache.folder, n, answers)) for n in range(1, 9)]
    for child in children:
        child.start()
    found = [answers.get() for _ in children]
    for child in children:
        child.join()
    assert len(set(found)) == 1


def test_without_links_an_answer_is_kept_all_the_same(cache, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert [cache.remember("fastest", FACTS, answer) for answer in ("one", "two")] == ["one", "one"]


def test_a_damaged_answer_is_set_aside_and_found_anew(cache, caplog):
    cache.remember("fastest", FACTS, "one")
    (path,) = (cache.folder / "choices").iterdir()
    path.write_text('{"answer"')
    assert cache.recall("fastest", FACTS) is None and "is damaged" in caplog.text
    assert cache.remember("fastest", FACTS, "two") == "two"
