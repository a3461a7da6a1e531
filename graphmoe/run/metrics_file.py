"""Functions that read metrics.jsonl without torch, cut it on resume, and summarise it."""

import json
import logging
import math
import statistics
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from graphmoe.config.ranges import number_of
from graphmoe.config.untrusted import LARGEST_BYTES, open_regular, worded
from graphmoe.run.files import REPORT_FILE, MetricsRow, display_path
from graphmoe.runtime.host.files import replace_text

Row = dict[str, Any]


MEDIANS = ("step_s", "tokens_per_s", "tflops", "mfu")
# host seconds of rank 0 waiting for data, or outside of steps
BESIDE_STEPS = ("data_s", "validation_s", "checkpoint_s")
SLOW, IN_A_ROW = 1.2, 10  # times the median from which a rank is late; logged steps after which it is slow

log = logging.getLogger(__name__)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of this user's metrics.jsonl; none if it does not exist. *Raises* FileError."""
    return [*lines_of(path, MetricsRow)]


def read_lines(path: Path, kind: type[Any]) -> list[Row]:
    """Return the valid JSON lines of a file of at most 1 GiB, none if there is none. *Raises* FileError."""
    return [*lines_of(path, kind, LARGEST_BYTES)]


def lines_of(path: Path, kind: type[Any], largest_bytes: float = math.inf) -> Iterator[Row]:
    """Yield the valid JSON lines of a file; none if it does not exist. *Raises* FileError."""
    if not path.exists():
        return
    decoder, wrong, first, number = msgspec.json.Decoder(kind), 0, "", 0
    with open_regular(path, largest_bytes) as file:
        for number, line in enumerate(file, start=1):
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                if line.endswith((b"\n", b"}")):  # else the last one, still being written
                    wrong, first = wrong + 1, first or f"line {number}: {worded(str(error))}"
    if wrong:
        log.warning("%d of %d lines of %s are invalid and ignored; the first: %s", wrong, number, path, first)


def steps_of(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "loss" in row]


def timed(steps: Sequence[Row]) -> list[Row]:
    """Return the steps except the first after each start or resume, which compiles; all if none remain."""
    later = [row for place, row in enumerate(steps) if place and row.get("start_s") is None]
    return later or [*steps]


def validations_of(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "val_loss" in row]


def cut_metrics(path: Path, step: int) -> int:
    """Atomically drop unreadable rows and those after ``step``; return their number."""
    if not path.exists():
        return 0
    text = path.read_bytes().decode("utf-8", errors="replace")
    lines = text.removesuffix("\n").split("\n") if text else []
    kept, unreadable = [], []
    for number, line in enumerate(lines, start=1):
        row = json_object(line)
        if row is None or not isinstance(row.get("step", step), int):
            unreadable.append(number)
        elif row.get("step", step) <= step:
            kept.append(line)
    if unreadable and unreadable != [len(lines)]:
        log.warning("%s: dropped lines that are no JSON object: %s", path, unreadable)
    if len(kept) < len(lines) or not text.endswith("\n"):
        replace_text(path, "".join(f"{line}\n" for line in kept), durably=True)
    return len(lines) - len(kept)


def json_object(text: str) -> Row | None:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def summarise(rows: Iterable[Row]) -> dict[str, Any]:
    """Return final losses, medians and sums; medians leave out the first step of each start."""
    step, validations, starts = dict[str, Any](), list[Row](), list[Row]()
    values = {name: array("d") for name in (*MEDIANS, *BESIDE_STEPS)}  # 8 bytes, as a run may have many steps
    for row in rows:
        if "val_loss" in row:
            validations.append(row)
        if "loss" not in row:
            continue
        is_start = not step or row.get("start_s") is not None
        starts += [row] * is_start
        for name in (*(() if is_start else MEDIANS), *BESIDE_STEPS):
            if row.get(name) is not None:
                values[name].append(row[name])
        step = row
    last = validations[-1] if validations and step and validations[-1]["step"] >= step["step"] else None
    summary: dict[str, Any] = {
        "final_loss": step.get("loss"),
        "first_val_loss": validations[0]["val_loss"] if validations else None,
        "first_val_step": validations[0]["step"] if validations else None,
        "final_val_loss": last["val_loss"] if last else None,
        "best_val_loss": min((v["val_loss"] for v in validations if v["val_loss"] is not None), default=None),
        "skipped_steps": step.get("skipped_total", 0),
    }
    for name in MEDIANS:
        found = values[name] or [row[name] for row in starts if row.get(name) is not None]
        summary[f"median_{name}"] = statistics.median(found) if found else None
    return summary | {name: sum(values[name]) if values[name] else None for name in BESIDE_STEPS}


def value_of(summary: dict[str, Any]) -> float | None:
    """Return the final validation loss, else the final training loss."""
    final = summary.get("final_val_loss")
    return summary.get("final_loss") if final is None else final


def render(summary: dict[str, Any]) -> str:
    lines = []
    if summary["sample"]:
        prompt = json.dumps(summary.get("sample_prompt"), ensure_ascii=False)
        lines += ["", f"A sample of what the model writes now, from {prompt} on:", "", summary["sample"], ""]
    first, last = summary["first_val_loss"], summary["final_val_loss"]
    if not summary["finished"]:
        loss = summary["final_loss"]
        reached = "" if loss is None else f", training loss {loss:.4f}"
        lines.append(f"stopped after step {summary['steps']}{reached}")
    elif first is not None and last is not None:
        lines.append(_validated(first, summary["first_val_step"], last, summary["steps"]))
    elif summary["final_loss"] is not None:
        lines.append(f"loss {summary['final_loss']:.3f} after {number_of(summary['steps'], 'step')}")
    folder = Path(summary["folder"])
    lines.append(f"results: {display_path(folder)}")
    if (folder / REPORT_FILE).exists():
        lines.append(f"report: {display_path(folder / REPORT_FILE)}")
    return "\n".join(lines)


def _validated(first: float, first_step: int, last: float, steps: int) -> str:
    if first_step == steps:
        return f"validation loss {last:.3f} after step {steps}"
    if first_step > 1:
        return f"validation loss {first:.3f} at step {first_step} -> {last:.3f} at step {steps}"
    return f"validation loss {first:.3f} -> {last:.3f} in {number_of(steps, 'step')}"
