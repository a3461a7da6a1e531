"""The compile cache of a job: one rank compiles a graph, and keys are the same in every job."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch._inductor.runtime import compile_tasks

from graphmoe.plan.layout import Layout
from graphmoe.runtime.cache.store import CompileCache
from graphmoe.runtime.compile import job_cache as job
from graphmoe.runtime.compile.code import CompileTurns
from graphmoe.runtime.ranks import Ranks
from graphmoe.runtime.torch_compat import fake_mode, make_fx, set_key_tag
from tests.runtime.cache.cache_contents import FACTS


@pytest.fixture
def opened(cache, monkeypatch) -> Iterator:
    for name in ("set_key_tag", "tune_each_kernel_once"):
        monkeypatch.setattr(job, name, lambda *arguments: None)
    with mock.patch.dict(os.environ):
        yield lambda layout=None, of=cache: job.JobCache(of, FACTS, Ranks(), layout)


def test_each_place_of_a_layout_has_graphs_of_its_own_where_code_is_kept(opened):
    folders = [opened(layout).graphs for layout in (Layout(), Layout(tp=2), Layout())]
    assert len({folder.name for folder in folders}) == 2 and folders[0].name == folders[2].name
    assert {folder.parent.name for folder in folders} == {"graphs"}
    assert opened(None).graphs is None and opened(Layout(), CompileCache(None)).graphs is None


def test_kernels_before_inductors_first_are_assembled_alike(opened, monkeypatch, tmp_path):
    """Keys must agree, or the next job, which finds Inductor's kernels in the cache, would compile again."""
    for folder in (
        "torch/bin",
        "torch/_inductor/bin",
    ):  # 2.13 looks in the second, 2.11 and 2.15 in the first
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "ptxas").touch(0o755)
    place = tmp_path / "torch" / "_inductor" / "runtime" / "compile_tasks.py"
    monkeypatch.setattr(compile_tasks, "__file__", str(place))
    os.environ.pop("TRITON_PTXAS_PATH", None)
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "0"
    compile_tasks._set_triton_ptxas_path.cache_clear()
    opened()
    assert os.environ["TRITON_PTXAS_PATH"].startswith(str(tmp_path))
    assert os.environ["TRITON_DEFAULT_FP_FUSION"] == "0"  # the user's
    del os.environ["TRITON_DEFAULT_FP_FUSION"]
    opened()
    assert os.environ["TRITON_DEFAULT_FP_FUSION"] == "1"
    compile_tasks._set_triton_ptxas_path.cache_clear()


VARIABLE = "TORCH_COMPILE_CACHE_KEY_TAG"
IN_A_COMPILE_WORKER = """
from torch._inductor.compile_worker.subproc_pool import SubprocPool
from graphmoe.runtime.torch_compat import set_key_tag
set_key_tag("facts")
pool = SubprocPool(1)
print(pool.submit(eval, "__import__('torch').compiler.config.cache_key_tag").result(timeout=100))
pool.shutdown()
"""


@pytest.mark.slow
def test_a_compile_worker_has_the_tag_too():
    words = [sys.executable, "-c", IN_A_COMPILE_WORKER]
    found = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert found.stdout.strip() == "graphmoe facts", found.stderr


def test_a_tag_takes_the_place_of_the_last_one_and_keeps_the_users(monkeypatch):
    monkeypatch.setenv(VARIABLE, "mine")
    for name in ("one", "two"):
        set_key_tag(name)
        assert torch.compiler.config.cache_key_tag == os.environ[VARIABLE] == f"mine graphmoe {name}"
    monkeypatch.delenv(VARIABLE)
    set_key_tag("three")
    assert torch.compiler.config.cache_key_tag.strip() == "graphmoe three"


def graph(width: int = 4, factor: float = 2.0):
    with fake_mode():
        return make_fx(lambda x: x * factor)(torch.empty(width))


def test_the_second_waits_until_the_first_is_done(tmp_path):
    def compiled_elsewhere(code) -> bool:
        with CompileTurns(tmp_path).turn(code) as turn:
            return turn.elsewhere

    with ThreadPoolExecutor(1) as rank:
        with CompileTurns(tmp_path).turn(graph()) as turn:
            second = rank.submit(compiled_elsewhere, graph())
            time.sleep(0.2)
            assert not turn.elsewhere and not second.done()
        assert second.result(10)


def test_who_fails_or_dies_or_compiles_another_graph_is_not_waited_for(tmp_path):
    turns, begun = CompileTurns(tmp_path), tmp_path / "begun"
    with pytest.raises(ValueError), turns.turn(graph()):
        raise ValueError
    child = os.fork()
    if child == 0:
        with turns.turn(graph()):
            begun.touch()
            time.sleep(60)
    while not begun.exists():
        time.sleep(0.01)
    with turns.turn(graph(width=8)), turns.turn(graph(factor=3.0)):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with turns.turn(graph()) as turn:
            assert not turn.elsewhere
