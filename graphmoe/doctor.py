"""What this machine can do: versions, devices and links, capabilities, optional libraries.

python -m graphmoe.doctor
python -m graphmoe.doctor format=json
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

import graphmoe
from graphmoe.config.arguments import emit, parse_args, run_tool
from graphmoe.config.packages import PACKAGES, Package
from graphmoe.config.schema import OutputFormat
from graphmoe.plan.costs.hardware import peak_tflops
from graphmoe.runtime.host.facts import environment, host, node_of_gpu

VERSIONED = ("torch", "triton", "hydra-core", "omegaconf", "numpy", "tokenizers", "safetensors", "rich")
PROBE_TIMEOUT_S = 60


@dataclass
class DoctorArgs:
    """Arguments of the tool."""

    format: OutputFormat = OutputFormat.text
    """What is printed on stdout: text, or one JSON document."""


@dataclass(frozen=True)
class Finding:
    """Whether the machine has a capability, and what was seen."""

    name: str
    ok: bool
    detail: str


def main(argv: list[str]) -> None:
    """Examine the machine and print the findings."""
    args = parse_args(DoctorArgs, argv, prog="graphmoe.doctor")
    document = examine()
    emit(document, render(document), args.format)


def examine() -> dict[str, Any]:
    """All findings as plain values. Captures one small graph on the first GPU if there is one."""
    probes = (probe_graphs, probe_symmetric_memory, probe_nccl, probe_gloo, probe_cpp_compiler)
    return {
        "versions": versions(),
        "host": host(),
        "environment": environment(),
        "devices": devices(),
        "links": links(),
        "capabilities": [dataclasses.asdict(probe()) for probe in probes],
        "libraries": [examine_package(package) for package in PACKAGES],
    }


def versions() -> dict[str, str | None]:
    """Versions of Python, of this project and of what it stands on; None where one is missing."""
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    if torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    found: dict[str, str | None] = {"python": platform.python_version(), "graphmoe": graphmoe.__version__}
    found |= {name: _version(name) for name in VERSIONED}
    return found | {"torch build": build}


def devices() -> list[dict[str, Any]]:
    """Name, memory, architecture, known bf16 peak and NUMA node of each GPU."""
    found: list[dict[str, Any]] = []
    for index in range(_num_gpus()):
        properties = torch.cuda.get_device_properties(index)
        architecture = f"sm_{properties.major}{properties.minor}"
        if torch.version.hip:
            architecture = properties.gcnArchName
        found.append(
            {
                "index": index,
                "name": properties.name,
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "architecture": architecture,
                "multiprocessors": properties.multi_processor_count,
                "peak_bf16_tflops": peak_tflops(properties.name),
                "numa_node": node_of_gpu(index),
            }
        )
    return found


def links() -> dict[str, Any]:
    """Which GPU can read which other's memory, and the vendor tool's picture of the links."""
    gpus = range(_num_gpus())
    if len(gpus) < 2:
        return {"peer_access": [], "topology": None}
    peers = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in gpus] for a in gpus]
    return {"peer_access": peers, "topology": _topology()}


def probe_graphs() -> Finding:
    """Capture a small graph on the first GPU and compare a replay with what it should give."""
    name = "device graphs"
    if not _num_gpus():
        return Finding(name, False, "no GPU")
    try:
        replayed = _replay_small_graph()
    except RuntimeError as error:  # what torch raises for driver and capture errors
        return Finding(name, False, _first_line(error))
    detail = "captured and replayed" if replayed == 7.0 else f"the replay gave {replayed}, not 7.0"
    return Finding(name, replayed == 7.0, detail)


def probe_symmetric_memory() -> Finding:
    """Name the allocator behind torch's symmetric memory. Nothing is allocated, no peer is waited for."""
    name = "symmetric memory"
    if not _num_gpus():
        return Finding(name, False, "no GPU")
    try:
        from torch.distributed import _symmetric_memory as symmetric

        backend = symmetric.get_backend(torch.device("cuda"))
        nvshmem = "NVSHMEM available" if symmetric.is_nvshmem_available() else "no NVSHMEM"
    except (ImportError, AttributeError, RuntimeError) as error:  # private: it may move or be left out
        return Finding(name, False, _first_line(error))
    return Finding(name, backend is not None, f"backend {backend or 'none'}, {nvshmem}")


def probe_nccl() -> Finding:
    """Look for NCCL, or RCCL under ROCm, in the torch build."""
    name = "RCCL" if torch.version.hip else "NCCL"
    if not (dist.is_available() and dist.is_nccl_available()):
        return Finding(name, False, "not in this build of torch")
    from torch.cuda import nccl

    return Finding(name, True, ".".join(map(str, nccl.version())))


def probe_gloo() -> Finding:
    """Look for gloo in the torch build."""
    ok = dist.is_available() and dist.is_gloo_available()
    return Finding("gloo", ok, "in this build of torch" if ok else "not in this build of torch")


def probe_cpp_compiler() -> Finding:
    """Compile what Inductor needs for a CPU: C++17, OpenMP and Python's headers."""
    name = "C++ compiler for Inductor"
    words = shlex.split(os.environ.get("CXX", "g++"))
    if not words or shutil.which(words[0]) is None:
        return Finding(name, False, f"{' '.join(words) or 'CXX is empty'}: not found; install g++ or set CXX")
    include = sysconfig.get_path("include")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(
            "#include <Python.h>\n#include <omp.h>\nint f() { return omp_get_max_threads(); }\n"
        )
        flags = ["-std=c++17", "-fopenmp", "-shared", "-fPIC", f"-I{include}", "-o", f"{folder}/probe.so"]
        try:
            run = _run([*words, str(source), *flags])
            about = _run([*words, "--version"])
        except (OSError, subprocess.TimeoutExpired) as error:
            return Finding(name, False, _first_line(error))
    if run.returncode:
        errors = [line for line in run.stderr.splitlines() if "error" in line] or [run.stderr]
        return Finding(name, False, _first_line(errors[0]))
    return Finding(name, True, _first_line(about.stdout))


def examine_package(package: Package) -> dict[str, Any]:
    """State, use and installation of one optional package."""
    state = "installed" if importlib.util.find_spec(package.module) else "missing"
    if state == "installed" and package.is_native:
        try:
            importlib.import_module(package.module)
        except (ImportError, OSError, RuntimeError) as error:  # a missing or mismatched shared library
            state = f"does not load: {_first_line(error)}"
    return {
        "name": package.module,
        "version": _version(package.distribution) if state != "missing" else None,
        "state": state,
        "enables": package.enables,
        "install": package.install,
    }


def render(document: dict[str, Any]) -> Group:
    """The findings as coloured tables for a terminal."""
    parts: list[RenderableType] = [_version_table(document)]
    if document["environment"]:
        parts.append(_environment_table(document["environment"]))
    if document["devices"]:
        parts.append(_device_table(document["devices"]))
    else:
        parts.append("[yellow]No usable GPU: runs use the CPU.[/yellow]")
    if document["links"]["peer_access"]:
        parts.append(_peer_table(document["links"]["peer_access"]))
    if document["links"]["topology"]:
        parts.append(Text(document["links"]["topology"], overflow="fold"))
    capabilities = _table("Capabilities", "capability", "", "detail")
    for finding in document["capabilities"]:
        capabilities.add_row(finding["name"], _mark(finding["ok"]), escape(finding["detail"]))
    return Group(*parts, capabilities, *_library_parts(document["libraries"]))


def _library_parts(libraries: list[dict[str, Any]]) -> list[RenderableType]:
    """The table of optional libraries, and how to install each one that cannot be used."""
    table = _table("Optional libraries", "library", "", "version", "enables")
    commands: list[RenderableType] = []
    for found in libraries:
        usable = found["state"] == "installed"
        table.add_row(found["name"], _mark(usable), found["version"] or "", escape(found["enables"]))
        if not usable:
            commands.append(Text(f"  {found['name']} ({found['state']}): {found['install']}"))
    return [table, "To install:", *commands] if commands else [table]


def _version_table(document: dict[str, Any]) -> Table:
    """Versions, then the host."""
    table = _table("Versions and host", "what", "found")
    for name, version in document["versions"].items():
        table.add_row(name, version or "[yellow]missing[/yellow]")
    table.add_section()
    for name, value in document["host"].items():
        table.add_row(
            name.replace("_gib", " GiB").replace("_", " "), "unknown" if value is None else str(value)
        )
    return table


def _environment_table(found: list[dict[str, str | None]]) -> Table:
    """One row for each variable."""
    table = _table("Environment", "variable", "set here", "a run on a GPU sets", "by key")
    for row in found:
        table.add_row(*(escape(value or "") for value in row.values()))
    return table


def _device_table(found: list[dict[str, Any]]) -> Table:
    """One row for each GPU."""
    columns = ("index", "name", "memory GiB", "architecture", "processors", "bf16 peak TFLOP/s", "NUMA node")
    table = _table("GPUs", *columns)
    for device in found:
        table.add_row(*("unknown" if value is None else str(value) for value in device.values()))
    return table


def _peer_table(peers: list[list[bool]]) -> Table:
    """One row and one column for each GPU."""
    table = _table("Peer access", "from \\ to", *(str(index) for index in range(len(peers))))
    for index, row in enumerate(peers):
        table.add_row(str(index), *(_mark(ok) for ok in row))
    return table


def _table(title: str, *columns: str) -> Table:
    """An empty table whose long cells wrap."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _mark(ok: bool) -> str:
    """A coloured yes or no."""
    return "[green]yes[/green]" if ok else "[red]no[/red]"


def _replay_small_graph() -> float:
    """The first value that a replay of 2x + 1 gives for x = 3. Syncs the device."""
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
    """The vendor tool's table of links, or its error; None where no tool is installed."""
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
    """Usable GPUs, 0 for a CPU build or without a driver."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """The finished command with its output as text."""
    return subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)


def _version(distribution: str) -> str | None:
    """Installed version of a distribution, None if it is missing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(text: object) -> str:
    """First line of a message, shortened; an error without one gives its type."""
    if isinstance(text, subprocess.TimeoutExpired):
        return f"no answer in {text.timeout} s"
    lines = str(text).strip().splitlines()
    return lines[0][:200] if lines else type(text).__name__


if __name__ == "__main__":
    run_tool(main)
