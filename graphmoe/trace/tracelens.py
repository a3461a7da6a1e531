"""AMD's TraceLens (github.com/AMD-AGI/TraceLens), where its command line is on PATH.

PyPI's package ``tracelens`` is another project, whose commands have other names; it is never called.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

COMMAND = "TraceLens_generate_perf_report_pytorch"
TIMEOUT_S = 1800


def tracelens_report(trace: Path) -> tuple[Path | None, str | None]:
    """Let TraceLens write its workbook beside a trace: the file, and what went wrong; neither without it."""
    command = shutil.which(COMMAND)
    if command is None:
        return None, None
    report = trace.with_name(f"{trace.name.split('.')[0]}.tracelens.xlsx")
    words = [command, "--profile_json_path", str(trace), "--output_xlsx_path", str(report)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{COMMAND} of {trace}: {error}"
    if done.returncode or not report.exists():
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        return None, f"{COMMAND} of {trace} ended with status {done.returncode}: {' '.join(last)}"
    return report, None
