"""A training run as a job of its own, as a user starts it: its command, its end, and what it wrote."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from graphmoe.bench.own_process import ProcessFailed
from graphmoe.run.files import METRICS_FILE
from graphmoe.runtime.host.signals import end_with_parent

log = logging.getLogger(__name__)
SHOWN = 4000
"""Characters of a failed job's output that are logged, since its folder goes."""
END_S = 10
"""Seconds that a job may take to end after each signal."""


def train(words: Sequence[str], folder: Path, limit_s: float) -> None:
    """Run the job, whose output goes to a file beside its folder. *Raises* ProcessFailed."""
    command = [sys.executable, "-m", "graphmoe.train", *words, f"hydra.run.dir={folder}"]
    said = folder.parent / "output"
    with said.open("wb") as output:
        job = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, preexec_fn=end_with_parent
        )
        try:
            status = job.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise ProcessFailed(
                f"not done after limit_s={limit_s:g} seconds, compilation included; use more"
            ) from None
        finally:
            _end(job)
    if status:
        text = said.read_text(encoding="utf-8", errors="replace").strip()
        log.error("the end of what the job said:\n%s", text[-SHOWN:])
        found = re.search(r"^error: (.*)\Z", text, re.MULTILINE | re.DOTALL)
        last = text.rpartition("\n")[2]
        raise ProcessFailed(found[1] if found else f"its process ended with status {status}: {last}")


def _end(job: subprocess.Popen[bytes]) -> None:
    """Let a job end that has not; its workers die with the process that started them."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # after the second it saves nothing
        if job.poll() is None:
            os.killpg(job.pid, number)
            try:
                job.wait(END_S)
            except subprocess.TimeoutExpired:
                continue


def steps_of(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of a run's steps."""
    for line in (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines():
        if "loss" in (row := json.loads(line)):
            yield row
