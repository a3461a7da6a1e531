"""The compile cache, by small files in the place of compiled code, and by torch and Triton themselves."""

import errno
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest.mock import Mock

import pytest

from graphmoe.runtime.cache.blobs import DRAFT
from graphmoe.runtime.cache.key import key_of
from graphmoe.runtime.cache.store import CompileCache
from tests.damage import flip_bit
from tests.runs import ROOT
from tests.runtime.cache.cache_contents import (
    FACTS,
    GROUP,
    KERNEL,
    blob_of,
    kept,
    read,
    warnings_of,
    write,
    write_kernel,
)


def test_a_job_finds_the_files_that_an_earlier_one_published(cache):
    first = cache.open(FACTS)
    assert (first.found, first.differences, first.num_files) == (False, [], 0)
    write(first, a="1", b="22")
    assert first.publish({"model": "tiny"}) == 2
    assert first.publish() == 0
    second = cache.open(dict(reversed(FACTS.items())))
    assert second.path != first.path and read(second) == {"a": "1", "b": "22"}
    assert (second.found, second.num_files, second.num_bytes, second.damaged) == (True, 2, 3, [])
    assert second.publish({"model": "small"}) == 0
    assert cache.entries.read(second.key).notes == {"model": "tiny"}


def test_a_later_publish_adds_to_the_entry(cache):
    work = cache.open(FACTS)
    write(work, a="1")
    work.publish({"model": "tiny", "graphs": 1})
    write(work, b="2")
    assert work.publish({"graphs": 2}) == 1
    entry = cache.entries.read(work.key)
    assert (entry.notes, len(entry.documents)) == ({"model": "tiny", "graphs": 2}, 1)
    assert read(cache.open(FACTS)) == {"a": "1", "b": "2"}


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove"])
def test_a_damaged_file_is_named_set_aside_and_made_again(cache, caplog, damage):
    kept(cache, a="1234", b="5678")
    blob = blob_of(cache, "inductor/ab/a.so")
    content = blob.read_bytes()
    changed = {"flip": b"1235", "truncate": content[:2], "empty": b"", "remove": None}[damage]
    blob.unlink() if changed is None else blob.write_bytes(changed)
    work = cache.open(FACTS)
    assert read(work) == {"b": "5678"} and work.found and work.damaged == ["inductor/ab/a.so"]
    (line,) = warnings_of(caplog)
    assert "inductor/ab/a.so" in line and work.key in line
    assert len(list((cache.folder / "damaged").glob("*"))) == (0 if changed is None else 1)
    write(work, a="1234")
    assert work.publish() == 1
    caplog.clear()
    assert read(cache.open(FACTS)) == {"a": "1234", "b": "5678"} and warnings_of(caplog) == []


OUTSIDE = ("", "../x", "inductor/../../x", "/etc/x", "turns/x")
"""Paths of files that no entry may name."""


def test_a_document_that_is_torn_or_names_files_outside_is_set_aside_and_the_others_hold(cache, caplog):
    kept(cache, a="1")
    (document,) = cache.entries.read(key_of(FACTS)).documents
    whole = json.loads(document.read_text())
    texts = ['{"facts": {', *(json.dumps(whole | {"files": {path: "0" * 64}}) for path in OUTSIDE)]
    for number, text in enumerate(texts, start=1):
        (document.parent / f"bad{number}.json").write_text(text)
        assert read(cache.open(FACTS)) == {"a": "1"}
        assert len([*(cache.folder / "damaged").iterdir()]) == len(warnings_of(caplog)) == number
    assert caplog.text.count("is damaged") == len(texts)


def publish_many(folder: Path, number: int) -> None:
    cache = CompileCache(folder)
    work = cache.open(FACTS)
    for step in range(10):
        write(work, same="same", **{f"from_{number}_{step}": "x" * number})
        work.publish({"rank": number})
    work.close()


def test_processes_that_publish_at_the_same_time_lose_nothing(cache, caplog):
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=publish_many, args=(cache.folder, number)) for number in range(4)]
    for child in children:
        child.start()
    while any(child.is_alive() for child in children):  # a reader meanwhile sees whole documents
        cache.entries.read(key_of(FACTS))
    for child in children:
        child.join()
        assert child.exitcode == 0
    expected = {f"from_{number}_{step}": "x" * number for number in range(4) for step in range(10)}
    assert read(cache.open(FACTS)) == {"same": "same", **expected}
    assert warnings_of(caplog) == []


class Killed(BaseException):
    """Stand-in for a kill, which nothing catches."""


@pytest.mark.parametrize("step", range(7))
def test_a_kill_while_publishing_leaves_the_old_entry_or_the_new_one(cache, monkeypatch, caplog, step):
    kept(cache, a="1")
    work = cache.open(FACTS)
    write(work, b="2", c="3")
    calls, write_bytes = iter(range(100)), Path.write_bytes

    def killing(function, die=lambda path, *arguments: None):
        def call(path, *arguments, **named):
            if path.suffix == DRAFT and function is unlink:
                return None  # who is killed tidies nothing up
            if next(calls) == step:
                die(path, *arguments)
                raise Killed
            return function(path, *arguments, **named)

        return call

    unlink = Path.unlink
    with monkeypatch.context() as patch:
        torn = killing(write_bytes, lambda path, content: write_bytes(path, content[:1]))
        patch.setattr(Path, "write_bytes", torn)
        for name in ("replace", "unlink"):
            patch.setattr(Path, name, killing(getattr(Path, name)))
        with pytest.raises(Killed):
            work.publish()
    later = cache.open(FACTS)
    assert read(later) in ({"a": "1"}, {"a": "1", "b": "2", "c": "3"})
    write(later, b="2", c="3")
    later.publish()
    assert read(cache.open(FACTS)) == {"a": "1", "b": "2", "c": "3"} and warnings_of(caplog) == []


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
    import os, sys
    from pathlib import Path
    compiler = Path("compiler")
    compiler.write_text('#!/bin/sh\\ncase "$*" in *-shared*) echo >> "$0.runs";; esac\\nexec g++ "$@"\\n')
    compiler.chmod(0o755)
    os.environ["CXX"] = str(compiler.absolute())
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
    num_kept = work.publish()
    print(counts["fx_hits"], counts["fx_misses"], work.found, work.damaged)
    print(num_kept, [str(path.relative_to(work.path)) for path in sorted(work.path.rglob("*.main.so"))])
"""


def ran(folder: Path, code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (folder / "job.py").write_text(textwrap.dedent(code))
    words, environment = [sys.executable, "job.py"], {**environment, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_torch_finds_its_code_in_another_work_folder_and_makes_again_what_is_damaged(cache, tmp_path):
    def job() -> tuple[str, ...]:
        """Return the output of a process that compiles, its log, and its number of runs of the compiler."""
        runs = tmp_path / "compiler.runs"
        runs.write_text("")
        done = ran(tmp_path, JOB, {**os.environ, "TORCHINDUCTOR_VEC_ISA_OK": "0"})
        return *done.stdout.splitlines(), done.stderr, str(len(runs.read_text()))

    result, made, _, runs = job()
    assert (result, runs) == ("0 1 False []", "1")
    code = made.split(" ", 1)[1]
    path = json.loads(code.replace("'", '"'))[0]
    result, made, log, runs = job()
    assert (result, made, runs) == ("1 0 True []", f"0 {code}", "0") and "compile cache" not in log
    (entry,) = cache.entries
    blob = cache.blobs.path(entry.files[path])
    flip_bit(blob)
    result, made, log, runs = job()
    assert (result, made, runs) == (f"1 0 True ['{path}']", f"1 {code}", "1")
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


def remember(folder: Path, number: int, answers) -> None:
    answers.put(CompileCache(folder).remember("fastest", FACTS, number))


def test_processes_that_remember_at_the_same_time_agree(cache):
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    children = [context.Process(target=remember, args=(cache.folder, n, answers)) for n in range(1, 9)]
    for child in children:
        child.start()
    assert len({answers.get() for _ in children}) == 1
    for child in children:
        child.join()


def test_locks_and_what_is_half_written_are_not_kept(cache):
    work = cache.open(FACTS)
    names = "inductor/locks/a.lock inductor/ab/.12.34.tmp inductor/ab/b.lock triton/ABC/lock"
    names += (
        " triton/ABC/tmp.pid_1_2/kernel.cubin triton/tmp.12/kernel.cubin turns/abc inductor/__pycache__/a.pyc"
    )
    for name in names.split():
        (work.path / name).parent.mkdir(parents=True, exist_ok=True)
        (work.path / name).write_text("")
    assert work.publish() == 0 and not list(cache.blobs)


def test_a_kernel_of_tritons_is_moved_with_the_paths_of_its_group(cache):
    first = cache.open(FACTS)
    write_kernel(first)
    assert first.publish() == 3
    assert str(first.path).encode() not in blob_of(cache, GROUP).read_bytes()
    first.close()
    second = cache.open(FACTS)
    group = json.loads((second.path / GROUP).read_text())
    assert group == {
        "child_paths": {n: str(second.path / "triton/ABC" / n) for n in ("kernel.json", "kernel.cubin")}
    }
    assert second.publish() == 0


def test_a_kernel_with_a_damaged_file_is_left_out_as_a_whole(cache, caplog):
    first = cache.open(FACTS)
    write_kernel(first)
    first.publish()
    blob_of(cache, KERNEL).write_bytes(b"?")
    second = cache.open(FACTS)
    assert not any(path.is_file() for path in (second.path / "triton").rglob("*"))
    second.publish()
    assert cache.entries.read(second.key).files == {}
    assert len(warnings_of(caplog)) == 2  # kernel.json has the content of kernel.cubin here


def test_a_group_of_which_a_file_is_in_no_document_is_made_again(cache):
    work = cache.open(FACTS)
    write_kernel(work)
    work.publish()
    (path,) = cache.entries.folder(work.key).glob("*.json")
    document = json.loads(path.read_text())
    del document["files"][KERNEL]
    path.write_text(json.dumps(document))
    assert not [*(cache.open(FACTS).path / "triton" / "ABC").rglob("*.*")]


def test_without_an_entry_the_nearest_of_the_same_base_lends_its_files(cache):
    kept(cache, FACTS | {"model.num_experts": 16, "model.top_k": 4}, far="far")
    kept(cache, FACTS | {"model.num_experts": 16}, used="1", unused="2")
    kept(cache, FACTS | {"base.torch": "2.11.0"}, foreign="never")
    work = cache.open(FACTS)
    assert read(work) == {"far": "far", "used": "1", "unused": "2"} and not work.found
    assert work.shared_from == key_of(FACTS | {"model.num_experts": 16})
    assert set(work.differences) <= {"model.num_experts changed: 16 -> 8", "torch changed: 2.11.0 -> 2.13.0"}


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


def test_lent_files_join_the_new_entry(cache):
    kept(cache, FACTS | {"model.num_experts": 16}, a="1", b="2")
    cache.open(FACTS).publish()
    assert read(cache.open(FACTS)) == {"a": "1", "b": "2"}


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

def refuse(*arguments, **named):
    raise AssertionError("compiled again")

work = CompileCache(Path("cache")).open({"base.triton": triton.__version__})
point_torch_at(work.path)
if work.found:
    ASTSource.make_ir = refuse
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
