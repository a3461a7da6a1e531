"""Autotuning of Inductor's Triton kernels (torch/_inductor/runtime), checked with torch 2.11 to 2.15."""

import functools
import os
from typing import Any

from torch._inductor.runtime.autotune_cache import AutotuneCache
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.runtime.triton_heuristics import CachingAutotuner


def tune_each_kernel_once() -> None:
    """Reuse the first autotuning result for all instances of a generated kernel, across jobs."""
    recheck, tune = CachingAutotuner.recheck_autotune_cache, CachingAutotuner.autotune_to_one_config
    if getattr(tune, "once", False):
        return
    # Every graph with the kernel tunes it anew, and not always alike: other blocks sum a reduction in another
    # order. Files are named by content.
    chosen: dict[str, str] = {}

    @functools.wraps(recheck)
    def recheck_here(self: CachingAutotuner, *args: Any, **kwargs: Any) -> None:
        if self.filename is not None:
            # a cached graph would look for the result in the folder of the job that compiled it
            self.filename = os.path.join(cache_dir(), *self.filename.split(os.sep)[-2:])
            if self.save_cache_hook is not None:
                of_compiler: AutotuneCache = self.save_cache_hook.__self__
                here = AutotuneCache.create(self.inductor_meta, self.filename, of_compiler.configs_hash)
                self.save_cache_hook = here and here.save
        recheck(self, *args, **kwargs)

    @functools.wraps(tune)
    def tune_once(self: CachingAutotuner, *args: Any, **kwargs: Any) -> None:
        if self.filename is None:
            tune(self, *args, **kwargs)
            return
        name = os.path.basename(self.filename)
        tuned = [one for one in self.launchers if str(one.config) == chosen.get(name)]
        tuned = tuned or _stored(self, self.filename)
        if len(tuned) == 1:
            self.launchers = tuned
            getattr(self, "_release_static_launchers_except", lambda launcher: None)(tuned[0])  # torch 2.13
        else:
            tune(self, *args, **kwargs)
        chosen[name] = str(self.launchers[0].config)

    tune_once.once = True  # type: ignore[attr-defined]
    CachingAutotuner.recheck_autotune_cache = recheck_here  # type: ignore[method-assign]
    CachingAutotuner.autotune_to_one_config = tune_once  # type: ignore[method-assign]


def _stored(kernel: CachingAutotuner, file: str) -> list[Any]:
    # torch 2.11 ignores stored configurations derived from register use after compilation
    cache = AutotuneCache.create(kernel.inductor_meta, file, "")
    best = cache._read() if cache else None
    if not best:
        return []

    def is_best(config: Any) -> bool:
        numbers = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
        return all(best.get(name) == value for name, value in numbers.items())

    return [launcher for launcher in kernel.launchers if is_best(launcher.config)]
