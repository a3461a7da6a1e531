"""Instances of a generated kernel run with one configuration, whichever was tuned first, in whichever job."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.runtime.autotune_cache import AutotuneCache
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, hash_configs

from graphmoe.runtime.torch_compat import tune_each_kernel_once


class Jobs:
    """Jobs one after the other, each in a work folder of its own that has the files of the one before."""

    def __init__(self, monkeypatch, folder):
        self._monkeypatch, self._folder, self._count = monkeypatch, folder, 0
        self.start()

    def start(self):
        """Begin the next job, whose process knows what is stored and no more."""
        before, after = self._work, self._folder / f"job{self._count + 1}"
        if self._count:
            before.rename(after)
        self._count += 1
        self._monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(after))
        for name in ("autotune_to_one_config", "recheck_autotune_cache"):
            torchs_own = inspect.unwrap(getattr(CachingAutotuner, name))
            self._monkeypatch.setattr(CachingAutotuner, name, torchs_own)
        tune_each_kernel_once()

    def file(self, name):
        (self._work / "ab").mkdir(parents=True, exist_ok=True)
        return str(self._work / "ab" / name)

    @property
    def _work(self):
        return self._folder / f"job{self._count}"


@pytest.fixture
def jobs(monkeypatch, tmp_path):
    return Jobs(monkeypatch, tmp_path)


def instance(file, milliseconds, derived=()):
    """A kernel with a launcher for each size of block, which a benchmark finds to take so long.

    The ``derived`` ones were added once it was compiled.
    """
    kernel = object.__new__(CachingAutotuner)
    kernel.filename, kernel.inductor_meta, kernel.mutated_arg_names = file, {}, {"changed"}
    kernel.fn = SimpleNamespace(__name__="triton_red", arg_names=["read", "changed"])
    kernel.precompile_time_taken_ns, kernel.save_cache_hook = 0, None
    configs = {size: _Config(kwargs={"R0_BLOCK": size}) for size in milliseconds}
    compiled = [config for size, config in configs.items() if size not in derived]
    kernel.compile_results = [SimpleNamespace(config=config) for config in configs.values()]
    kernel.launchers = [_Launcher(config=config) for config in configs.values()]
    kernel.tunings = 0

    def benchmark(*args, **kwargs):
        kernel.tunings += 1
        return {one: milliseconds[one.config.kwargs["R0_BLOCK"]] for one in kernel.launchers}

    kernel.benchmark_all_configs = benchmark
    kernel.is_statically_launchable = lambda: True
    kernel._could_rblock_scale = False  # asked for by torch 2.15
    kernel._release_static_launchers_except = lambda launcher: None
    if file is not None:
        cache = AutotuneCache.create({}, file, hash_configs(compiled))
        assert cache is not None
        kernel.save_cache_hook = cache.save
    return kernel


class _Config(SimpleNamespace):
    num_warps, num_stages, num_ctas, maxnreg, pre_hook = 4, 1, 1, None, None
    num_consumer_groups = num_buffers_warp_spec = 0


class _Launcher(SimpleNamespace):
    __hash__ = object.__hash__
    n_regs, n_spills, shared, cache_hash = 1, 0, 0, "hash"


def tuned(kernel, *arguments):
    kernel.autotune_to_one_config(*arguments)
    (launcher,) = kernel.launchers
    return launcher.config.kwargs["R0_BLOCK"]


def test_an_instance_takes_what_the_first_was_tuned_to(jobs):
    assert tuned(instance(jobs.file("a.py"), {512: 1.0, 1024: 1.1})) == 512
    second = instance(jobs.file("a.py"), {512: 1.1, 1024: 1.0})
    assert (tuned(second), second.tunings) == (512, 0)
    assert tuned(instance(jobs.file("b.py"), {512: 1.1, 1024: 1.0})) == 1024
    assert tuned(instance(jobs.file("a.py"), {64: 1.1, 128: 1.0})) == 128


def test_a_kernel_that_changes_gigabytes_is_not_tuned_on_copies_of_them(jobs):
    small, large = torch.empty(8, device="meta"), torch.empty(2**30 + 1, dtype=torch.int8, device="meta")
    assert tuned(instance(jobs.file("a.py"), {1: 1.0, 8: 1.1}), large, small) == 1
    kernel = instance(jobs.file("b.py"), {1: 1.0, 8: 1.1})
    assert (tuned(kernel, small, large), kernel.tunings) == (8, 0)


def test_a_later_job_takes_what_is_stored_also_for_a_derived_configuration(jobs):
    assert tuned(instance(jobs.file("a.py"), {512: 1.1, 256: 1.0}, derived=(256,))) == 256
    jobs.start()
    later = instance(jobs.file("a.py"), {512: 1.0, 256: 1.1}, derived=(256,))
    assert (tuned(later), later.tunings) == (256, 0)


def test_a_kernel_of_a_cached_graph_looks_in_the_work_folder_of_this_job(jobs):
    cached = instance(jobs.file("a.py"), {512: 1.1, 1024: 1.0})
    other = instance(jobs.file("b.py"), {512: 1.1, 1024: 1.0})
    assert tuned(instance(jobs.file("a.py"), {512: 1.0, 1024: 1.1})) == 512
    jobs.start()
    cached.recheck_autotune_cache(None)
    (compiled,) = cached.compile_results
    assert compiled.config.kwargs == {"R0_BLOCK": 512}
    other.recheck_autotune_cache(None)
    assert (len(other.compile_results), tuned(other)) == (2, 1024)
    jobs.start()
    assert tuned(instance(jobs.file("b.py"), {512: 1.0, 1024: 1.1})) == 1024  # what `other` has stored
