"""Files of a work folder: those that are kept, Triton's that are moved, those that another entry lends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphmoe.runtime.cache.key import key_of
from tests.runtime.cache.cache_contents import (
    FACTS,
    GROUP,
    KERNEL,
    blob_of,
    kept,
    read,
    warnings_of,
    write_kernel,
)

ROOT = Path(__file__).parents[3]


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


def test_without_an_entry_the_nearest_of_the_same_base_lends_its_files(cache):
    kept(cache, FACTS | {"model.num_experts": 16, "model.top_k": 4}, far="far")
    kept(cache, FACTS | {"model.num_experts": 16}, used="1", unused="2")
    kept(cache, FACTS | {"base.torch": "2.11.0"}, foreign="never")
    work = cache.open(FACTS)
    assert read(work) == {"far": "far", "used": "1", "unused": "2"} and not work.found
    assert work.shared_from == key_of(FACTS | {"model.num_experts": 16})
    assert set(work.differences) <= {
        "model.num_experts changed: 16 -> 8",
        "torch changed: 2.11.0 -> 2.13.0",
    }


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
from graphmoe.runtime.cache.store import CompileCache

@triton.jit
def double(x, BLOCK: tl.constexpr):
    places = x + tl.arange(0, BLOCK)
    tl.store(places, tl.load(places) * 2)

def refuse(*arguments, **named):
    raise AssertionError("compiled again")

work = CompileCache(Path("cache")).open({"base.triton": triton.__version__})
work.activate()
if work.found:
    ASTSource.make_ir = refuse
source = ASTSource(double, {"x": "*fp32", "BLOCK": "constexpr"}, {(1,): 64})
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
print(work.found, kernel.metadata.name, len(kernel.asm["cubin"]), work.publish() > 4)
"""


@pytest.mark.slow
def test_triton_takes_a_kernel_that_it_has_compiled_in_another_work_folder(cache, tmp_path):
    pytest.importorskip("triton")
    (tmp_path / "job.py").write_text(KERNEL_JOB)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)

    def job() -> list[str]:
        command = [sys.executable, "job.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    found, name, size, keeps = job()
    assert (found, name, keeps) == ("False", "double", "True")
    assert job() == ["True", "double", size, "False"]
