"""Findings of the doctor: versions, devices and links, capabilities, optional libraries."""

import functools
import importlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.box import HEAVY_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import graphmoe
from graphmoe.config.arguments import text_table
from graphmoe.config.packages import PACKAGES, Package, is_installed, version_of
from graphmoe.config.schema import DeviceChoice, HostConfig
from graphmoe.plan.costs.hardware import peak_tflops

VERSIONED = ("torch", "triton", "hydra-core", "omegaconf", "numpy", "tokenizers", "safetensors", "rich")
PROBE_TIMEOUT_S = 60
DEVICE_COLUMNS = (
    "index", "name", "memory GiB", "architecture", "processors", "bf16 peak TFLOP/s", "NUMA node",
)  # fmt: skip
SHOWN = re.compile(
    r"(NCCL|RCCL|NVSHMEM|HSA|TORCH_NCCL|TORCH_SYMM_MEM|GLOO)_|"
    r"(GPU_MAX_HW_QUEUES|OMP_NUM_THREADS|(CUDA|HIP|ROCR)_VISIBLE_DEVICES)$"
)


def examine() -> dict[str, Any]:
    """Return all findings as plain values; captures one small graph on the first GPU if there is one."""
    import torch

    nccl = "RCCL" if torch.version.hip else "NCCL"
    probes = {name.format(nccl=nccl): probe for name, probe in CAPABILITIES.items()}
    return {
        "versions": versions(),
        "host": host(),
        "environment": environment(),
        "devices": devices(),
        "links": links(),
        "capabilities": [examine_capability(*each) for each in probes.items()],
        "libraries": [examine_package(package) for package in PACKAGES],
    }


def versions() -> dict[str, str | None]:
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    return {
        "python": platform.python_version(),
        "graphmoe": graphmoe.__version__,
        **{name: version_of(name) for name in VERSIONED},
        "torch build": f"ROCm {torch.version.hip}" if torch.version.hip else cuda,
    }


def devices() -> list[dict[str, Any]]:
    import torch

    every = [torch.cuda.get_device_properties(index) for index in range(_num_gpus())]
    return [
        {
            "index": index,
            "name": found.name,
            "memory_gib": round(found.total_memory / 2**30, 1),
            "architecture": found.gcnArchName if torch.version.hip else f"sm_{found.major}{found.minor}",
            "multiprocessors": found.multi_processor_count,
            "peak_bf16_tflops": peak_tflops(found.name),
            "numa_node": node_of_gpu(index),
        }
        for index, found in enumerate(every)
    ]


def host() -> dict[str, Any]:
    import torch

    from graphmoe.runtime.host.tuning import cores_here, cpus_of_nodes

    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "physical_cores_for_a_run": cores_here(),
        "numa_nodes": len(cpus_of_nodes()) or None,
        "torch_threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def node_of_gpu(index: int) -> int | None:
    """Return the NUMA node that a GPU is attached to; None if the system does not say."""
    import torch

    from graphmoe.runtime.host.tuning import numa_node

    try:
        return numa_node(torch.device("cuda", index))
    except (OSError, RuntimeError, ValueError):
        return None


def environment() -> list[dict[str, str | None]]:
    """Return variables that a run on a GPU sets by default, and similar ones that are set here."""
    from graphmoe.runtime.host.environment import variables

    wanted = {variable.name: variable for variable in variables(HostConfig(), DeviceChoice.cuda)}
    there = {name for name in os.environ if SHOWN.match(name)}
    return [
        {
            "name": name,
            "present": os.environ.get(name),
            "a_run_sets": wanted[name].value if name in wanted and name not in os.environ else None,
            "key": wanted[name].key if name in wanted else None,
        }
        for name in sorted(wanted.keys() | there)
    ]


def links() -> dict[str, Any]:
    """Return whether each GPU reaches the memory of each other, and the vendor tool's table of links."""
    import torch

    gpus = range(_num_gpus())
    if len(gpus) < 2:
        return {"peer_access": [], "topology": None}
    peers = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in gpus] for a in gpus]
    return {"peer_access": peers, "topology": _topology()}


def examine_capability(name: str, probe: Callable[[], str]) -> dict[str, Any]:
    try:
        return {"name": name, "ok": True, "detail": probe()}
    # of torch for drivers and capture; of its private parts, which may move; of a compiler
    except (RuntimeError, ImportError, AttributeError, OSError, subprocess.TimeoutExpired) as error:
        return {"name": name, "ok": False, "detail": _first_line(error)}


def probe_graphs() -> str:
    _require(_num_gpus(), "no GPU")
    replayed = _replay_small_graph()
    _require(replayed == 7.0, f"the replay gave {replayed}, not 7.0")
    return "captured and replayed"


def probe_symmetric_memory() -> str:
    """Return the backend of torch's symmetric memory; allocates nothing and waits for no peer."""
    _require(_num_gpus(), "no GPU")
    import torch
    from torch.distributed import _symmetric_memory as symmetric

    backend = symmetric.get_backend(torch.device("cuda"))
    nvshmem = "NVSHMEM available" if symmetric.is_nvshmem_available() else "no NVSHMEM"
    _require(backend is not None, f"backend none, {nvshmem}")
    return f"backend {backend}, {nvshmem}"


def probe_backend(name: str) -> str:
    import torch
    import torch.distributed as dist

    is_built = dist.is_available() and getattr(dist, f"is_{name}_available")()
    _require(is_built, "not in this build of torch")
    return ".".join(map(str, torch.cuda.nccl.version())) if name == "nccl" else "in this build of torch"


def probe_cpp_compiler() -> str:
    """Compile a file with Inductor's needs (C++17, OpenMP, Python.h); return the compiler's version."""
    words = shlex.split(os.environ.get("CXX", "g++"))
    is_there = bool(words) and shutil.which(words[0]) is not None
    _require(is_there, f"{' '.join(words) or 'CXX is empty'}: not found; install g++ or set CXX")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(
            "#include <Python.h>\n#include <omp.h>\nint f() { return omp_get_max_threads(); }\n"
        )
        flags = ["-std=c++17", "-fopenmp", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}"]
        run = _run([*words, str(source), *flags, "-o", f"{folder}/probe.so"])
        about = _run([*words, "--version"])
    errors = [line for line in run.stderr.splitlines() if "error" in line] or [run.stderr]
    _require(not run.returncode, errors[0])
    return _first_line(about.stdout)


CAPABILITIES: dict[str, Callable[[], str]] = {
    "device graphs": probe_graphs,
    "symmetric memory": probe_symmetric_memory,
    "{nccl}": functools.partial(probe_backend, "nccl"),
    "gloo": functools.partial(probe_backend, "gloo"),
    "C++ compiler for Inductor": probe_cpp_compiler,
}


def _require(holds: object, why: str) -> None:
    if not holds:
        raise RuntimeError(why)


def examine_package(package: Package) -> dict[str, Any]:
    state = "installed" if is_installed(package.module) else "missing"
    if state == "installed" and package.is_native:
        try:
            importlib.import_module(package.module)
        except (ImportError, OSError, RuntimeError) as error:  # a missing or mismatched shared library
            state = f"does not load: {_first_line(error)}"
    plugin = version_of(package.plugin) if package.plugin else None
    if state == "installed" and package.plugin and plugin is None:
        state = f"installed without {package.plugin}"
    return {
        "name": package.module,
        "version": version_of(package.distribution) if state != "missing" else None,
        "plugin": f"{package.plugin} {plugin}" if plugin else None,
        "state": state,
        "enables": package.enables,
        "install": package.install,
    }


def render(document: dict[str, Any]) -> Group:
    shown = {name: name.replace("_gib", " GiB").replace("_", " ") for name in document["host"]}
    facts = {shown[name]: value for name, value in document["host"].items()}
    rows: list[list[Any]] = [[name, version or "missing"] for name, version in document["versions"].items()]
    parts: list[RenderableType] = [
        table("Versions and host", ("what", "found"), rows + [[*fact] for fact in facts.items()])
    ]
    if document["environment"]:
        rows = [[value or "" for value in row.values()] for row in document["environment"]]
        parts.append(table("Environment", ("variable", "set here", "a run on a GPU sets", "by key"), rows))
    if document["devices"]:
        parts.append(table("GPUs", DEVICE_COLUMNS, [[*device.values()] for device in document["devices"]]))
    else:
        parts.append("[yellow]No usable GPU: runs use the CPU.[/yellow]")
    if peers := document["links"]["peer_access"]:
        rows = [[index, *row] for index, row in enumerate(peers)]
        parts.append(table("Peer access", ["from \\ to", *range(len(peers))], rows))
    if document["links"]["topology"]:
        parts.append(Text(document["links"]["topology"], overflow="fold"))
    rows = [[each["name"], each["ok"], each["detail"]] for each in document["capabilities"]]
    parts.append(table("Capabilities", ("capability", "", "detail"), rows))
    libraries = document["libraries"]
    found = {a["name"]: ", ".join(filter(None, (a["version"], a["plugin"]))) for a in libraries}
    rows = [[a["name"], a["state"] == "installed", found[a["name"]], a["enables"]] for a in libraries]
    parts.append(table("Optional libraries", ("library", "", "version", "enables"), rows))
    if unusable := [found for found in libraries if found["state"] != "installed"]:
        lines = [f"  {found['name']} ({found['state']}): {found['install']}" for found in unusable]
        parts.append(Text("\n".join(["To install:", *lines])))
    return Group(*parts)


def table(title: str, columns: Sequence[object], rows: Iterable[Iterable[object]]) -> Table:
    """Return a terminal table; a bool is a coloured yes or no, None is unknown."""
    cells = [[*map(_cell, row)] for row in rows]
    style: dict[str, Any] = {"title": title, "title_justify": "left", "box": HEAVY_HEAD, "pad_edge": True}
    return text_table([*map(str, columns)], cells, names=range(len(columns)), **style)


def _cell(value: object) -> Text:
    if isinstance(value, Text):
        return value
    if isinstance(value, bool):
        return Text("yes", "green") if value else Text("no", "red")
    return Text("unknown" if value is None else str(value))


def _replay_small_graph() -> float:
    import torch

    x = torch.zeros(8, device="cuda")
    (x * 2 + 1).sum()  # load the kernels before capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = x * 2 + 1
    x.fill_(3)
    graph.replay()
    return float(y[0])


def _topology() -> str | None:
    for command in (["nvidia-smi", "topo", "-m"], ["rocm-smi", "--showtopotype"]):
        if shutil.which(command[0]):
            try:
                run = _run(command)
            except (OSError, subprocess.TimeoutExpired) as error:
                return f"{command[0]}: {_first_line(error)}"
            return re.sub(r"\x1b\[[0-9;]*m", "", run.stdout or run.stderr).strip()
    return None


@functools.cache
def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)


def _first_line(text: object) -> str:
    if isinstance(text, subprocess.TimeoutExpired):
        return f"no answer in {text.timeout} s"
    lines = str(text).strip().splitlines()
    return lines[0][:200] if lines else type(text).__name__
