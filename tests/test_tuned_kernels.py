"""Instances of one generated kernel run with one configuration, whichever of them was tuned first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from graphmoe.torch_compat import tune_each_kernel_once


@pytest.fixture
def saved(monkeypatch) -> list[tuple[str | None, str]]:
    """(file, configuration) of each that was stored for later jobs."""
    monkeypatch.setattr(CachingAutotuner, "autotune_to_one_config", CachingAutotuner.autotune_to_one_config)
    tune_each_kernel_once()
    return []


def instance(
    filename: str | None, milliseconds: dict[str, float], saved: list[tuple[str | None, str]]
) -> CachingAutotuner:
    """A kernel with a launcher for each configuration, which a benchmark finds to take so long."""
    kernel: Any = object.__new__(CachingAutotuner)
    kernel.filename, kernel.fn = filename, SimpleNamespace(__name__="triton_red_fused")
    kernel.precompile_time_taken_ns, kernel.compile_results, kernel.inductor_meta = 0, [], {}
    facts = {"n_regs": 1, "n_spills": 0, "shared": 0, "cache_hash": "hash"}
    kernel.launchers = [_Launcher(config=name, **facts) for name in milliseconds]
    kernel.benchmark_all_configs = lambda *args, **kwargs: {
        launcher: milliseconds[launcher.config] for launcher in kernel.launchers
    }
    kernel.save_cache_hook = lambda config, *args, **kwargs: saved.append((filename, config))
    kernel._release_static_launchers_except = lambda launcher: None
    return kernel


class _Launcher(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def tuned(kernel: Any) -> str:
    kernel.autotune_to_one_config()
    (launcher,) = kernel.launchers
    return launcher.config


def test_a_second_instance_takes_what_the_first_was_tuned_to(saved):
    assert tuned(instance("a.py", {"R0_BLOCK=512": 1.0, "R0_BLOCK=1024": 1.1}, saved)) == "R0_BLOCK=512"
    assert tuned(instance("a.py", {"R0_BLOCK=512": 1.1, "R0_BLOCK=1024": 1.0}, saved)) == "R0_BLOCK=512"
    assert saved == 2 * [("a.py", "R0_BLOCK=512")]


def test_other_kernels_and_those_without_the_configuration_are_tuned(saved):
    assert tuned(instance("a.py", {"R0_BLOCK=512": 1.0, "R0_BLOCK=1024": 1.1}, saved)) == "R0_BLOCK=512"
    assert tuned(instance("b.py", {"R0_BLOCK=512": 1.1, "R0_BLOCK=1024": 1.0}, saved)) == "R0_BLOCK=1024"
    assert tuned(instance("a.py", {"R0_BLOCK=64": 1.1, "R0_BLOCK=128": 1.0}, saved)) == "R0_BLOCK=128"


def test_kernels_without_a_file_are_tuned_each_time(saved):
    assert tuned(instance(None, {"R0_BLOCK=512": 1.0, "R0_BLOCK=1024": 1.1}, saved)) == "R0_BLOCK=512"
    assert tuned(instance(None, {"R0_BLOCK=512": 1.1, "R0_BLOCK=1024": 1.0}, saved)) == "R0_BLOCK=1024"


def test_asking_twice_changes_nothing(saved):
    once = CachingAutotuner.autotune_to_one_config
    tune_each_kernel_once()
    assert CachingAutotuner.autotune_to_one_config is once
