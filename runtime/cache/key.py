"""Facts: all that compiled code depends on, by name; their hash is the key of the cache."""

import functools
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from graphmoe.config.ranges import spelled
from graphmoe.config.schema import RunConfig
from graphmoe.ops import triton_version
from graphmoe.passes import PASSES
from graphmoe.passes.base import PassSpec
from graphmoe.plan.forced_loads import NO_LOAD

Facts = Mapping[str, Any]  # plain values by dotted names; base.* are device, versions and sources

# Config sections whose keys are facts, except `NOT_COMPILED`
WHOLE_SECTIONS = ("model", "precision", "recompute")
NOT_COMPILED = ("model.name", "model.hf_family", "model.peak_lr", "model.init_std", "model.bias_update_rate")
# not optim.bucket_mb, nor the number of ranks: only the update depends on them
SINGLE_KEYS = (
    "data.seq_len",
    "data.document_mask",
    "train.micro_batch_size",
    "moe.experts",
    "moe.force_balance",
    "moe.dispatcher",
    "moe.transport",
    "moe.receive_budget",
    "moe.balance",
    "moe.replica_slots",
    "moe.replica_keep",
    "parallel.tp",
    "parallel.cp",
    "parallel.cp_method",
    "parallel.ep",
    "parallel.etp",
    "parallel.dp_shard",
    "pipeline.ep_overlap",
    "optim.name",
    "optim.schedule",
    "optim.moment_dtype",
    "optim.master_dtype",
    "optim.grad_dtype",
    "optim.offload",
    "graph.scope",
)
BASE, OWN_PASS, EXTRA_PASS = "base.", "passes.own.", "passes.extra."
KEY_DIGITS = 24


def facts_of(config: RunConfig, passes: Sequence[PassSpec], device: torch.device) -> dict[str, Any]:
    """Return what compiled code depends on, by name. Call it after the number of threads is set."""
    facts = {key: _plain(value) for key, value in _settings(config)}
    facts["moe.expert_load"] = config.moe.expert_load != NO_LOAD  # the load itself is a buffer
    facts["optim.qk_clip"] = config.optim.qk_clip > 0  # attention is compiled without the threshold
    facts["passes.enabled"] = [spec.name for spec in passes]
    for spec in passes:
        prefix = OWN_PASS if spec.name in (own.name for own in PASSES) else EXTRA_PASS
        facts[prefix + spec.name] = _short_hash(spec.fingerprint())
    return facts | {f"{BASE}{name}": value for name, value in base_facts(device).items()}


def key_of(facts: Facts) -> str:
    """Return the key of a set of facts: 24 hexadecimal digits of SHA-256."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]


def base_of(facts: Facts) -> str:
    return key_of({name: value for name, value in facts.items() if name.startswith(BASE)})


def may_share(facts: Facts, other: Facts) -> bool:
    """Return whether equal graphs compile to equal code under both: base facts and shared plug-ins agree."""
    names = {name for name in (*facts, *other) if name.startswith(BASE)}
    names |= {name for name in facts if name.startswith(EXTRA_PASS) and name in other}
    return all(name in facts and name in other and facts[name] == other[name] for name in names)


def differences(facts: Facts, other: Facts) -> list[str]:
    """Return changes from ``other`` to ``facts``, one line each: 'model.num_experts changed: 8 -> 16'."""
    names = [*facts, *(name for name in other if name not in facts)]
    changed = [name for name in names if facts.get(name) != other.get(name)]
    in_one = {name for name in changed if (name in facts) != (name in other)}
    told = {name for name in in_one if name.startswith((OWN_PASS, EXTRA_PASS))}  # by the list of passes
    sources = {name for name in changed if name.startswith(f"{BASE}sources.")}
    several = [f"sources of {len(sources)} folders changed"] if len(sources) > 2 else []
    told |= sources if several else set()
    return several + [
        _difference(name, other.get(name), facts.get(name)) for name in changed if name not in told
    ]


def base_facts(device: torch.device) -> dict[str, Any]:
    """Return the cache key's facts that all configurations share: sources, versions and device."""
    return {
        **{f"sources.{name}": digest for name, digest in source_hashes().items()},
        "torch": torch.__version__,
        "triton": triton_version(),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "libc": os.confstr("CS_GNU_LIBC_VERSION") if hasattr(os, "confstr") else None,
        "machine": platform.machine(),
        "cpu_instructions": _short_hash(_cpu_line("flags", "Features").encode()),
        **(_gpu_facts(device) if device.type == "cuda" else _cpu_facts()),
    }


@functools.cache
def source_hashes() -> dict[str, str]:
    """Return for each folder a short hash of its sources' names and contents."""
    contents: dict[str, list[bytes]] = {}
    root = Path(*sys.modules[__name__.partition(".")[0]].__path__)
    # all folders: code that affects compiled code may be anywhere
    for file in own_sources():
        name, text = file.relative_to(root.parent), file.read_bytes()
        folder = contents.setdefault(str(name.parent), [])
        folder.append(b"%s\0%d\0%s" % (name.name.encode(), len(text), text))
    return {folder: _short_hash(b"".join(content)) for folder, content in contents.items()}


def own_sources() -> list[Path]:
    """Return all sources of this package, sorted; follows links."""
    (root,) = sys.modules[__name__.partition(".")[0]].__path__
    folders = os.walk(root, followlinks=True)
    return sorted(
        Path(folder, name) for folder, _, names in folders for name in names if name.endswith(".py")
    )


def _settings(config: RunConfig) -> Iterator[tuple[str, Any]]:
    for section in fields(config):
        values = getattr(config, section.name)
        for key in fields(values) if hasattr(values, "__dataclass_fields__") else ():
            name = f"{section.name}.{key.name}"
            if name in SINGLE_KEYS or (section.name in WHOLE_SECTIONS and name not in NOT_COMPILED):
                yield name, getattr(values, key.name)


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _difference(name: str, before: Any, now: Any) -> str:
    if name.startswith(f"{BASE}sources."):
        return f"sources of {name.removeprefix(f'{BASE}sources.')} changed"
    if name.startswith((OWN_PASS, EXTRA_PASS)):
        return f"the pass {name.rpartition('.')[2]} changed"
    name = name.removeprefix(BASE)
    if name == "cpu_instructions":
        return "the CPU's instructions changed"
    if isinstance(before, list) and isinstance(now, list):
        moves = [f"+ {item}" for item in now if item not in before]
        moves += [f"- {item}" for item in before if item not in now]
        return f"{name} changed: {' '.join(moves) or 'another order'}"
    return f"{name} changed: {spelled(before)} -> {spelled(now)}"


def _gpu_facts(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "capability": getattr(properties, "gcnArchName", None) or f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def _cpu_facts() -> dict[str, Any]:
    return {
        "device": _cpu_line("model name", "CPU part") or platform.processor() or "cpu",
        # Inductor's CPU code depends on these
        "threads": torch.get_num_threads(),
        "compiler": _compiler_version(),
    }


def _cpu_line(*names: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in found if name.strip() in names), "")


@functools.cache
def _compiler_version() -> str | None:
    words = shlex.split(os.environ.get("CXX", "g++"))
    try:
        run = subprocess.run([*words, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, IndexError, subprocess.SubprocessError):
        return None
    return next(iter(run.stdout.splitlines()), None)


def _short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
