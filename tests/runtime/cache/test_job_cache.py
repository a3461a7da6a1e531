"""The compile cache of a job whose ranks have different layers."""

from __future__ import annotations

import os
from unittest import mock

from graphmoe.torch_compat import tuned_kernels
from graphmoe.world import World
from runtime.cache import job
from runtime.cache.job import JobCache
from tests.runtime.cache.cache_contents import FACTS, write


def opened(cache, monkeypatch, world: World) -> JobCache:
    for module, name in ((job, "set_key_tag"), (tuned_kernels, "tune_each_kernel_once")):
        monkeypatch.setattr(module, name, lambda *arguments: None)
    return JobCache(cache, FACTS, world)


def test_what_every_rank_has_measured_is_kept_for_the_next_job(cache, monkeypatch):
    with mock.patch.dict(os.environ):
        world = World()
        monkeypatch.setattr(world, "gather", lambda item: [item, {"of rank 1": 5}])
        first = opened(cache, monkeypatch, world)
        first.measured["of rank 0"] = 3
        assert first._work is not None
        write(first._work, a="1")
        first.publish({"graphs": 1}, {"model": "tiny"})
        first._work.close()
        assert opened(cache, monkeypatch, world).measured == {"of rank 0": 3, "of rank 1": 5}
