"""Twenty checks of this machine, each bounded in time, and one JSON file of their results.

Checks of a group run in one child process. One that fails ends its child, since an error of a GPU spoils all
later calls of a process; another child goes on with the rest.
"""

import faulthandler
import functools
import getpass
import multiprocessing
import os
import platform
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Group
from rich.text import Text

import graphmoe
from graphmoe.bench.cases import without_folders
from graphmoe.config.packages import VENDORS, version_of
from graphmoe.config.schema import AttentionBackend
from graphmoe.doctor import exchanges, machine, operations, training
from graphmoe.doctor.outcome import Error, Numbers, Skipped, require_gpus
from graphmoe.run.files import write_json
from graphmoe.run.machine import git_commit

TOTAL_S, START_S, LAST_LINES = 880, 120, 20
DRIVERS = {"/proc/driver/nvidia/version": r"\d+\.\d+[.\d]*", "/sys/module/amdgpu/version": r"\S+"}
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
STYLES = {PASSED: "green", FAILED: "red", SKIPPED: "yellow"}


class Check(NamedTuple):
    name: str
    group: str
    run: Callable[[torch.device], Numbers]  # raises Skipped if it cannot run here
    gpus: int = 0  # that it needs
    limit_s: float = 120


def _table() -> tuple[Check, ...]:
    ops, by, backends = operations, functools.partial, AttentionBackend
    mlp, train = ops.grouped_mlp, "training"
    libraries = backends.flash4, backends.te, backends.turbo
    return (
        Check("grouped MLP in Triton", "kernels", by(mlp, backend="triton"), 1, 180),
        Check("attention of torch", "kernels", ops.torch_attention),
        Check("delta net", "kernels", ops.delta_rule),
        Check("router, permute and loss", "kernels", ops.routing),
        Check("symmetric products", "kernels", ops.symmetric_products),
        *(Check(f"fp8 {name}", "fp8", by(ops.fp8_recipe, recipe=name)) for name in ops.SIGNAL_DB),
        # AITER builds its kernels at the first call
        Check("attention of libraries", "vendors", by(ops.attention_backends, backends=libraries), 1, 300),
        Check("AITER attention", "vendors", ops.aiter, 1, 300),
        Check("Primus-Turbo grouped GEMM", "vendors", by(mlp, backend="turbo", dtypes=[ops.BF16]), 1, 300),
        Check("all-reduce in a graph", "ranks", by(exchanges.all_reduces, replays=100), 1),
        Check("symm exchanges", "ranks", by(exchanges.token_exchanges, kind="symm", replays=1000), 1, 240),
        Check("DeepEP exchanges", "ranks", by(exchanges.token_exchanges, kind="vendor", replays=100), 2),
        Check("checkpoint resume", train, training.resume, limit_s=180),
        *(
            Check(f"graph scope {scope}", train, by(training.capture_scope, scope=scope), 1, 300)
            for scope in ("partial", "layer", "full_iteration")
        ),
        Check("compiled step", train, training.compiled_step, limit_s=400),
    )


TABLE = _table()


def prove(path: Path, table: Sequence[Check], total_s: float = TOTAL_S) -> dict[str, Any]:
    """Run checks; return the document, which is in the file after each of them. *Raises* OSError."""
    started = time.monotonic()
    document: dict[str, Any] = {**software(), "gpus": None, "seconds": 0.0, "checks": []}
    write_json(path, document)  # an error now, not after all checks
    with tempfile.TemporaryDirectory(prefix="prove_") as folder:
        for found in _results(table, started + total_s, Path(folder)):
            if "name" not in found:
                document |= found
                continue
            document["checks"].append(found)
            document["seconds"] = round(time.monotonic() - started, 1)
            write_json(path, document)
            done = f"[{len(document['checks'])}/{len(table)}]"
            print(f"{done} {found['name']}: {found['status']} ({found['seconds']} s)", file=sys.stderr)
    return document


def software() -> dict[str, Any]:
    """Return versions; nothing here names this host or its user."""
    every = machine.versions()
    vendors = {package.module: version_of(package.distribution) for package in VENDORS.values()}
    kept = {name: every[name] for name in ("graphmoe", "python", "torch", "torch build", "triton")}
    return kept | {"commit": git_commit(), "driver": _driver(), "vendors": vendors}


def _driver() -> str | None:
    for path, pattern in DRIVERS.items():
        with suppress(OSError):
            if match := re.search(pattern, Path(path).read_text()):
                return match[0]
    return f"kernel {platform.release()}" if os.path.exists("/dev/kfd") else None


def _results(table: Sequence[Check], end: float, folder: Path) -> Iterator[dict[str, Any]]:
    left = [*table]
    while left:
        group = [check for check in left if check.group == left[0].group]
        if time.monotonic() >= end:
            found = iter([_result(left[0], FAILED, 0.0, "not started: the time for all checks was over")])
        else:
            found = _of_child(group, end, folder)
        for each in found:
            yield each
            if "name" in each:
                left.remove(next(check for check in left if check.name == each["name"]))


def _of_child(checks: Sequence[Check], end: float, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield this machine's GPUs, then results until the first failure."""
    context, log = multiprocessing.get_context("spawn"), folder / "log"
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_run_child, args=(checks, there, folder, log))
    child.start()
    there.close()
    try:
        found = _received(here, child, min(START_S, max(end - time.monotonic(), 1)), log)
        if isinstance(found, str):
            yield _result(checks[0], FAILED, START_S, found)
            return
        yield found
        for check in checks:
            started = time.monotonic()
            found = _received(here, child, min(check.limit_s, max(end - started, 1)), log)
            if isinstance(found, str):
                found = _result(check, FAILED, time.monotonic() - started, found)
            yield found
            if found["status"] == FAILED:
                return
        child.join(10)
    finally:
        assert child.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()
        child.join()
        here.close()


def _received(here: Connection, child: BaseProcess, limit_s: float, log: Path) -> dict[str, Any] | str:
    """Return what the child sends, or why there is nothing, with the last lines that it printed."""
    assert child.pid is not None
    try:
        if here.poll(limit_s):
            found: dict[str, Any] = here.recv()
            return found
        why = f"no result in {limit_s:.0f} s; stacks of the process:"
        os.kill(child.pid, signal.SIGABRT)  # faulthandler prints them
        child.join(5)
    except (EOFError, ProcessLookupError):
        child.join(5)
        why = f"the process ended with status {child.exitcode}:"
    return f"{why}\n{clean(log.read_text(errors='replace') if log.exists() else '')}"


def _run_child(checks: Sequence[Check], there: Connection, folder: Path, log: Path) -> None:
    os.setsid()  # ranks that it starts end with it
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    faulthandler.enable()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic steps
    tempfile.tempdir = str(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)
    there.send({"gpus": machine.devices()})
    for check in checks:
        found = run_check(check, device)
        there.send(found)
        if found["status"] == FAILED:
            return


def run_check(check: Check, device: torch.device) -> dict[str, Any]:
    """Run a check in this process; an error, or a number over its limit, is a failure with its text."""
    started, numbers, reason, status = time.monotonic(), Numbers(), "", PASSED
    try:
        require_gpus(device, check.gpus)
        numbers = check.run(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # an error of a kernel is raised here
        over = {name: each for name, each in numbers.items() if isinstance(each, Error) and each.is_over}
        if over:
            status = FAILED
            reason = ", ".join(f"{n} is {each.error:.3g}, over {each.limit:.3g}" for n, each in over.items())
    except Skipped as skipped:
        status, reason = SKIPPED, clean(str(skipped))
    except Exception:  # whatever a kernel, a compiler or the allocator may raise
        status, reason = FAILED, clean(traceback.format_exc())
    return _result(check, status, time.monotonic() - started, reason, numbers)


def _result(check: Check, status: str, seconds: float, reason: str, numbers: Numbers | None = None) -> Any:
    shown = {n: e.to_json() if isinstance(e, Error) else e for n, e in (numbers or {}).items()}
    return {
        "name": check.name,
        "status": status,
        "seconds": round(seconds, 1),
        "numbers": shown,
        "reason": reason,
    }


def clean(text: str) -> str:
    """Return the last lines of a text without folders outside the package, host name and user name."""
    text = "\n".join(text.strip().splitlines()[-LAST_LINES:])
    text = without_folders(text.replace(f"{Path(graphmoe.__path__[0]).parent}{os.sep}", ""))
    with suppress(KeyError, OSError):  # a user without a name
        text = re.sub(rf"\b{re.escape(getpass.getuser())}\b", "USER", text)
    return re.sub(rf"\b{re.escape(platform.node())}\b", "HOST", text) if platform.node() else text


def render(document: dict[str, Any]) -> Group:
    checks = document["checks"]
    rows = [
        [each["name"], Text(each["status"], STYLES[each["status"]]), f"{each['seconds']:.1f}", _brief(each)]
        for each in checks
    ]
    counts = ", ".join(f"{sum(each['status'] == s for each in checks)} {s}" for s in STYLES)
    return Group(
        machine.table("Checks", ("check", "status", "s", "largest error over its limit, or reason"), rows),
        Text(f"{counts}; {document['seconds']:.0f} s"),
    )


def _brief(check: dict[str, Any]) -> str:
    if check["reason"]:
        return check["reason"].splitlines()[-1][:200]
    limited = {n: e for n, e in check["numbers"].items() if isinstance(e, dict)}
    name = max(limited, key=lambda n: limited[n]["error"] / (limited[n]["limit"] or 1), default=None)
    return "" if name is None else f"{name} {limited[name]['error']:.2g} of {limited[name]['limit']:.2g}"
