"""The tag in the keys of torch's caches: of this process and of those that compile kernels for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from graphmoe.runtime.torch_compat import set_key_tag

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
    set_key_tag("one")
    assert torch.compiler.config.cache_key_tag == os.environ[VARIABLE] == "mine graphmoe one"
    set_key_tag("two")
    assert torch.compiler.config.cache_key_tag == os.environ[VARIABLE] == "mine graphmoe two"
    monkeypatch.delenv(VARIABLE)
    set_key_tag("three")
    assert torch.compiler.config.cache_key_tag.strip() == "graphmoe three"
