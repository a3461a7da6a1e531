"""The compile cache, by small files in the place of compiled code, and by torch and Triton themselves."""

import errno
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import Mock

import pytest

from graphmoe.runtime.cache.blobs import DRAFT
from graphmoe.runtime.cache.key import key_of
from tests.damage import flip_bit
from tests.runs import ROOT
from tests.runtime.cache.cache_contents import FACTS, KERNEL, blob_of, kept, read, warned, write, write_kernel

FORK = multiprocessing.get_context("fork")


def test_a_job_finds_the_files_that_earlier_ones_published(cache):
    first = cache.open(FACTS)
    assert (first.found, first.differences, first.num_files) == (False, [], 0)
    write(first, a="1", b="22")
    assert first.publish({"model": "tiny", "graphs": 1}) == 2
    assert first.publish() == 0
    second = cache.open(dict(reversed(FACTS.items())))
    assert second.path != first.path and read(second) == {"a": "1", "b": "22"}
    assert (second.found, second.num_files, second.num_bytes, second.damaged) == (True, 2, 3, [])
    assert second.publish({"model": "small"}) == 0
    assert cache.entries.read(second.key).notes == {"model": "tiny", "graphs": 1}
    write(first, c="3")
    assert first.publish({"graphs": 2}) == 1
    entry = cache.entries.read(first.key)
    assert (entry.notes, len(entry.documents)) == ({"model": "tiny", "graphs": 2}, 1)
    assert read(cache.open(FACTS)) == {"a": "1", "b": "22", "c": "3"}


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove"])
def test_a_damaged_file_is_named_set_aside_and_made_again(cache, caplog, damage):
    kept(cache, a="1234", b="5678")
    blob = blob_of(cache, "inductor/ab/a.so")
    content = blob.read_bytes()
    changed = {"flip": b"1235", "truncate": content[:2], "empty": b"", "remove": None}[damage]
    blob.unlink() if changed is None else blob.write_bytes(changed)
    work = cache.open(FACTS)
    assert read(work) == {"b": "5678"} and work.found and work.damaged == ["inductor/ab/a.so"]
    (line,) = warned(caplog)
    assert "inductor/ab/a.so" in line and work.key in line
    assert len(list((cache.folder / "damaged").glob("*"))) == (0 if changed is None else 1)
    write(work, a="1234")
    assert work.publish() == 1
    caplog.clear()
    assert read(cache.open(FACTS)) == {"a": "1234", "b": "5678"} and warned(caplog) == []


def test_a_document_that_is_torn_or_names_files_outside_is_set_aside_and_the_others_hold(cache, caplog):
    kept(cache, a="1")
    (document,) = cache.entries.read(key_of(FACTS)).documents
    whole = json.loads(document.read_text())
    outside = ("", "../x", "inductor/../../x", "/etc/x", "turns/x")
    texts = ['{"facts": {', *(json.dumps(whole | {"files": {path: "0" * 64}}) for path in outside)]
    for number, text in enumerate(texts, start=1):
        (document.parent / f"bad{number}.json").write_text(text)
        assert read(cache.open(FACTS)) == {"a": "1"}
        assert len([*(cache.folder / "damaged").iterdir()]) == len(warned(caplog)) == number
    assert caplog.text.count("is damaged") == len(texts)


def forked(call: Callable[[int], object], count: int) -> list[BaseProcess]:
    children = [FORK.Process(target=call, args=(number,)) for number in range(count)]
    for child in children:
        child.start()
    return children


def test_processes_that_publish_at_the_same_time_lose_nothing(cache, caplog):
    def publish_many(number: int) -> None:
        work = cache.open(FACTS)
        for step in range(10):
            write(work, same="same", **{f"from_{number}_{step}": "x" * number})
            work.publish({"rank": number})
        work.close()

    children = forked(publish_many, 4)
    while any(child.is_alive() for child in children):  # a reader meanwhile sees whole documents
        cache.entries.read(key_of(FACTS))
    assert [child.exitcode for child in children] == [0] * 4
    expected = {f"from_{number}_{step}": "x" * number for number in range(4) for step in range(10)}
    assert read(cache.open(FACTS)) == {"same": "same", **expected}
    assert warned(caplog) == []


class Killed(BaseException):
    """Stand-in for a kill, which nothing catches."""


@pytest.mark.parametrize("step", range(7))
def test_a_kill_while_publishing_leaves_the_old_entry_or_the_new_one(cache, monkeypatch, caplog, step):
    kept(cache, a="1")
    work = cache.open(FACTS)
    write(work, b="2", c="3")
    calls = iter(range(100))

    def killing(name: str):
        def call(path, *arguments, **named):
            if path.suffix == DRAFT and name == "unlink":
                return None  # who is killed tidies nothing up
            if next(calls) != step:
                return real(path, *arguments, **named)
            if name == "write_bytes":
                real(path, arguments[0][:1])
            raise Killed

        real = getattr(Path, name)
        return call

    with monkeypatch.context() as patch:
        for name in ("write_bytes", "replace", "unlink"):
            patch.setattr(Path, name, killing(name))
        with pytest.raises(Killed):
            work.publish()
    later = cache.open(FACTS)
    assert read(later) in ({"a": "1"}, {"a": "1", "b": "2", "c": "3"})
    write(later, b="2", c="3")
    later.publish()
    assert read(cache.open(FACTS)) == {"a": "1", "b": "2", "c": "3"} and warned(caplog) == []


def test_a_file_that_was_pruned_before_it_was_named_is_stored_again(cache, monkeypatch):
    work = cache.open(FACTS)
    write(work, a="1")
    entry_write = cache.entries.write

    def prune_first(*arguments):
        shutil.rmtree(cache.folder / "blobs")
        return entry_write(*arguments)

    monkeypatch.setattr(cache.entries, "write", prune_first)
    work.publish()
    assert read(cache.open(FACTS)) == {"a": "1"}


JOB = """
import json
from pathlib import Path
import torch
import torch._inductor.config
torch._inductor.config.cpp_cache_precompile_headers = False  # takes longer than what it would save here
from graphmoe.runtime.torch_compat import cache_counts
from graphmoe.runtime.cache.folders import point_torch_at
from graphmoe.runtime.cache.store import CompileCache

work = CompileCache(Path("cache")).open({"base.torch": torch.__version__, "model.width": 8})
point_torch_at(work.path)
with cache_counts() as counts, torch.no_grad():
    torch.compile(lambda x: (x.sin() * 2).cumsum(0))(torch.arange(6.0))
codes = [str(path.relative_to(work.path)) for path in sorted(work.path.rglob("*.main.so"))]
found = [counts["fx_hits"], counts["fx_misses"], work.found, work.damaged]
print(json.dumps([found, codes, work.publish()]))
"""


def ran(folder: Path, code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (folder / "job.py").write_text(code)
    words, environment = [sys.executable, "job.py"], {**environment, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_torch_finds_its_code_in_another_work_folder_and_makes_again_what_is_damaged(cache, tmp_path):
    compiler, runs = tmp_path / "compiler", tmp_path / "compiler.runs"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-shared*) echo >> "$0.runs";; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    environment = {**os.environ, "CXX": str(compiler), "TORCHINDUCTOR_VEC_ISA_OK": "0"}

    def job() -> tuple[list, list[str], int, int, str]:
        """Return what a process that compiles says, its number of runs of the compiler, and its log."""
        runs.write_text("")
        done = ran(tmp_path, JOB, environment)
        return *json.loads(done.stdout), len(runs.read_text()), done.stderr

    found, (path,), num_kept, num_runs, _ = job()
    assert (found, num_runs) == ([0, 1, False, []], 1) and num_kept > 1
    *second, log = job()
    assert second == [[1, 0, True, []], [path], 0, 0] and "compile cache" not in log
    (entry,) = cache.entries
    blob = cache.blobs.path(entry.files[path])
    flip_bit(blob)
    *third, log = job()
    assert third == [[1, 0, True, [path]], [path], 1, 1]
    assert f"{path} of entry {entry.key} is damaged" in log
    assert [file.name.split(".")[0] for file in (cache.folder / "damaged").iterdir()] == [blob.name]


@pytest.mark.parametrize("has_links", [True, False])
def test_the_first_answer_that_is_remembered_holds(cache, monkeypatch, caplog, has_links):
    if not has_links:
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "no links here")))
    assert cache.recall("fastest", FACTS) is None
    assert cache.remember("fastest", FACTS, {"choice": "one"}) == {"choice": "one"}
    assert cache.remember("fastest", FACTS, {"choice": "two"}) == {"choice": "one"}
    assert cache.recall("fastest", FACTS | {"more": 1}) is None and cache.recall("other", FACTS) is None
    (path,) = (cache.folder / "choices").iterdir()
    path.write_text('{"answer"')
    assert cache.recall("fastest", FACTS) is None and "is damaged" in caplog.text
    assert cache.remember("fastest", FACTS, "three") == "three"


def test_processes_that_remember_at_the_same_time_agree(cache):
    answers = FORK.SimpleQueue()
    children = forked(lambda number: answers.put(cache.remember("fastest", FACTS, number + 1)), 8)
    assert len({answers.get() for _ in children}) == 1
    for child in children:
        child.join()


def test_locks_and_what_is_half_written_are_not_kept(cache):
    work = cache.open(FACTS)
    names = """inductor/locks/a.lock inductor/ab/.12.34.tmp inductor/ab/b.lock inductor/__pycache__/a.pyc
    triton/ABC/lock triton/ABC/tmp.pid_1_2/kernel.cubin triton/tmp.12/kernel.cubin turns/abc"""
    for name in names.split():
        (work.path / name).parent.mkdir(parents=True, exist_ok=True)
        (work.path / name).write_text("")
    assert work.publish() == 0 and not list(cache.blobs)


def test_a_kernel_of_tritons_is_moved_with_the_paths_of_its_group(cache):
    first, group = cache.open(FACTS), "triton/ABC/__grp__kernel.json"
    write_kernel(first)
    assert first.publish() == 3
    assert str(first.path).encode() not in blob_of(cache, group).read_bytes()
    first.close()
    second = cache.open(FACTS)
    paths = {name: str(second.path / "triton/ABC" / name) for name in ("kernel.json", "kernel.cubin")}
    assert json.loads((second.path / group).read_text()) == {"child_paths": paths}
    assert second.publish() == 0


def test_a_kernel_with_a_damaged_or_unnamed_file_is_made_again(cache, caplog):
    first = cache.open(FACTS)
    write_kernel(first)
    first.publish()
    (path,) = cache.entries.folder(first.key).glob("*.json")
    document, blob = json.loads(path.read_text()), blob_of(cache, KERNEL)
    files = {name: digest for name, digest in document["files"].items() if name != KERNEL}
    path.write_text(json.dumps({**document, "files": files}))
    assert not [*(cache.open(FACTS).path / "triton" / "ABC").rglob("*.*")] and warned(caplog) == []
    path.write_text(json.dumps(document))
    blob.write_bytes(b"?")
    second = cache.open(FACTS)
    assert not any(path.is_file() for path in (second.path / "triton").rglob("*"))
    second.publish()
    assert cache.entries.read(second.key).files == {}
    assert len(warned(caplog)) == 2  # kernel.json has the content of kernel.cubin here


def test_without_an_entry_the_nearest_of_the_same_base_lends_its_files(cache):
    kept(cache, FACTS | {"model.num_experts": 16, "model.top_k": 4}, far="far")
    kept(cache, FACTS | {"model.num_experts": 16}, used="1", unused="2")
    kept(cache, FACTS | {"base.torch": "2.11.0"}, foreign="never")
    work = cache.open(FACTS)
    assert read(work) == {"far": "far", "used": "1", "unused": "2"} and not work.found
    assert work.shared_from == key_of(FACTS | {"model.num_experts": 16})
    assert set(work.differences) <= {"model.num_experts changed: 16 -> 8", "torch changed: 2.11.0 -> 2.13.0"}
    work.publish()
    assert read(cache.open(FACTS)) == read(work)


def test_graphs_are_for_jobs_of_the_same_facts_and_for_ranks_of_the_node_alone(cache):
    work = cache.open(FACTS, ["rank 0", "rank 1"])
    for rank in (0, 1):
        place = work.path / "graphs" / f"rank {rank}"
        place.mkdir()
        (place / "ab12").write_text("traced")
    work.publish()
    one = cache.open(FACTS, ["rank 1"])
    assert [*one.path.rglob("ab12")] == [one.path / "graphs" / "rank 1" / "ab12"]
    one.publish()  # and keeps what it has not taken
    assert len([*cache.open(FACTS, ["rank 0", "rank 1"]).path.rglob("ab12")]) == 2
    other = cache.open(FACTS | {"model.num_experts": 16}, ["rank 0", "rank 1"])
    assert other.shared_from == work.key and not [*other.path.rglob("ab12")]


KERNEL_JOB = """
import sys
from pathlib import Path
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from graphmoe.runtime.cache.folders import point_torch_at
from graphmoe.runtime.cache.store import CompileCache

@triton.jit
def double(x, BLOCK: tl.constexpr):
    places = x + tl.arange(0, BLOCK)
    tl.store(places, tl.load(places) * 2)

work = CompileCache(Path("cache")).open({"base.triton": triton.__version__})
point_torch_at(work.path)
if work.found:
    ASTSource.make_ir = None  # fails if it is compiled again
source = ASTSource(double, {"x": "*fp32", "BLOCK": "constexpr"}, {(1,): 64})
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
print(work.found, kernel.metadata.name, len(kernel.asm["cubin"]), work.publish() > 4)
"""


@pytest.mark.slow
def test_triton_takes_a_kernel_that_it_has_compiled_in_another_work_folder(cache, tmp_path):
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

    def job() -> list[str]:
        return ran(tmp_path, KERNEL_JOB, environment).stdout.split()

    found, name, size, keeps = job()
    assert (found, name, keeps) == ("False", "double", "True")
    assert job() == ["True", "double", size, "False"]
