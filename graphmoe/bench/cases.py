"""Benchmark cases: running them, timing the backends of an operation, and tables of the results."""

import gc
import json
import logging
import math
import os
import re
import string
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from graphmoe.bench import BenchArgs
from graphmoe.config.schema import ConfigError
from graphmoe.ops.grouped_mlp.choice import MlpShape, random_inputs
from graphmoe.ops.timing import WARM_UP_CALLS, spread, time_in_turns

log = logging.getLogger(__name__)
FLOPS_PER_S = 790e12  # an 8192 x 8192 x 8192 bf16 matrix product on random data on an H200
FP8_FLOPS_PER_S = 1450e12  # the same in fp8, a scale for each row of either side
BYTES_PER_S = 4.3e12  # a copy on an H200, bytes read and written
RATES = {"FLOPs": FLOPS_PER_S, "fp8 FLOPs": FP8_FLOPS_PER_S, "bytes": BYTES_PER_S}
TOLERANCE = 0.03  # Frobenius norm of a difference over the whole; bf16 sums in another order differ by 0.005
MOST_NAMED = 30  # names of cases that an error lists; of more, their beginnings
SKEW = 4  # rows of the largest expert over the mean, in a skewed routing
SCALES = {"%": 100.0, "Mi": 2**-20, "Gi": 2**-30, "M": 1e-6, "G": 1e-9, "T": 1e-12}
LAYERS = {
    "v2_lite": (MlpShape(16384, 2048, 1408, 64, 6), MlpShape(64, 32, 16, 8, 2)),
    "qwen3_30b": (MlpShape(16384, 2048, 768, 128, 8), MlpShape(64, 32, 48, 16, 4)),
    "v3_ep8": (MlpShape(4096, 7168, 2048, 32, 8), MlpShape(32, 64, 32, 8, 2)),
}
"""Experts of DeepSeek-V2-Lite, Qwen3-30B-A3B, and an eighth of DeepSeek-V3's, full and tiny."""

Row = dict[str, Any]  # one measurement as the JSON document has it; ``error`` is None if it did not fail
Measured = tuple[list[Row], list[str], dict[str, Any]]  # rows, what was left out, how it was measured
Call = Callable[[], Any]
Calls = Mapping[str, Call]


class CaseFailed(Exception):
    """Error whose message says why a case has no result."""


class Case(NamedTuple):
    name: str
    about: Row  # facts that each of its rows begins with, also the one of a case that fails
    run: Callable[[], list[Row]]  # what rows have beyond that; what it raises is the error of a row


class Suite(NamedTuple):
    """A suite: the function that measures it, and the formats (see `Scaled`) of its table."""

    measure: Callable[[BenchArgs, torch.device, bool], Measured]  # bool: whether shapes are full
    columns: str  # heads and formats of a row's numbers: "case: {case} | ms: {median_ms:.2f}"
    legend: str  # paragraphs below the table, formats of the document
    shown: Callable[[Row], Row] = dict  # a row with texts that only the table has


class Run(NamedTuple):
    """A timed call, and its forward alone, for measuring the saved activations."""

    call: Call
    forward: Callable[[], Tensor]


class Operation(NamedTuple):
    """One operation at one shape, and the FLOPs or bytes that it takes at least."""

    name: str
    shape: dict[str, Any]
    amount: float
    kind: Literal["FLOPs", "fp8 FLOPs", "bytes"]
    results: tuple[str, ...]  # names of a call's results, which must be those of the first alternative
    make: Callable[[torch.Generator], Mapping[str, Call | Run]]  # alternatives, reference first
    memory: Literal["kept", "peak"] | None = None
    """kept: bytes held between forward and backward beside inputs and output. peak: most bytes in use
    above the inputs and all results but the first."""

    @property
    def floor_ms(self) -> float:
        return self.amount / RATES[self.kind] * 1e3

    def case(self, device: torch.device, repeats: int) -> Case:
        about: Row = {"case": self.name, "shape": self.shape, "floor_kind": self.kind}
        about |= {"floor_amount": self.amount, "floor_ms": self.floor_ms, "alternative": "all"}
        return Case(self.name, about, lambda: self.rows(device, repeats, lambda _: self.floor_ms))

    def rows(self, device: torch.device, repeats: int, floor_ms: Callable[[str], float]) -> list[Row]:
        """Check, warm up and time each backend; return a row for each, with the error if it failed."""
        rows: dict[str, Row] = {}
        calls: dict[str, Call] = {}
        expected: Any = None
        for name, made in self.make(torch.Generator(device).manual_seed(0)).items():
            row = rows[name] = {"alternative": name, "error": None}
            call = made.call if isinstance(made, Run) else made
            results = None  # or two alternatives' are held at once
            try:
                results = call()
                for _ in range(WARM_UP_CALLS - 1):
                    call()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # an error of a kernel is raised here
                if self.results:
                    results = (results,) if isinstance(results, Tensor) else results
                    row["error"] = compare(self.results, results, expected or results)
                    expected = expected or (results if row["error"] is None else None)
                if row["error"] is None:
                    row |= {"memory_kind": self.memory, "memory_bytes": self._memory_bytes(made, device)}
                    calls[name] = call
            except Exception as error:  # whatever a kernel, a compiler or the allocator may raise
                row["error"] = reason(error)
        del expected, results
        for name, samples in time_in_turns(calls, repeats, device).items():
            rows[name] |= times_of(samples, floor_ms(name))
        return [*rows.values()]

    def _memory_bytes(self, made: Call | Run, device: torch.device) -> int | None:
        if self.memory is None or device.type != "cuda":
            return None
        torch.cuda.synchronize(device)
        gc.collect()  # or tensors of an earlier alternative may be freed between the two counts
        if isinstance(made, Run):  # autograd's thread may free those of the last backward between them, once
            return max(_kept_bytes(made.forward, device) for _ in range(3))
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        results = made()
        return torch.cuda.max_memory_allocated(device) - before - sum(result.nbytes for result in results[1:])


def _kept_bytes(forward: Callable[[], Tensor], device: torch.device) -> int:
    before = torch.cuda.memory_allocated(device)
    output = forward()
    return torch.cuda.memory_allocated(device) - before - output.nbytes


def times_of(samples_ms: Sequence[float], floor_ms: float) -> Row:
    p10, median, p90 = (round(ms, 6) for ms in spread(samples_ms))
    row: Row = {"samples_ms": [round(ms, 6) for ms in samples_ms]}
    row |= {"p10_ms": p10, "median_ms": median, "p90_ms": p90}
    return row | {"time_over_floor": median / floor_ms, "share_of_floor_rate": floor_ms / median}


def compare(names: Sequence[str], results: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """Return an error if a result is not finite or differs from the expected one."""
    wrong: list[str] = []
    for name, result, wanted in zip(names, results, expected, strict=False):
        if result.is_floating_point():
            sides = result.to(wanted.dtype) - wanted, wanted
            off, whole = (vector_norm(each, dtype=torch.float32) for each in sides)
            difference = float(off / whole.clamp_min(1e-30))
            if not math.isfinite(difference):
                wrong.append(f"{name} is not finite")
            elif difference > TOLERANCE:
                wrong.append(f"{name} differs by {difference:.1%} from the first alternative's")
    return "; ".join(wrong) or None


def reason(error: BaseException) -> str:
    """Return the kind and first line of an error, without folders of this machine."""
    if isinstance(error, (CaseFailed, ConfigError)):
        return " ".join(str(error).split())
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return without_folders(": ".join([type(error).__name__, *lines[:1]]))


def without_folders(text: str) -> str:
    return re.sub(r"(?<![\w./:~])/(?:[^/\s'\",=]+/)+", "", text)


def chosen(names: Sequence[str], only: Sequence[str]) -> list[str]:
    """Return the names that begin with one of ``only``. *Raises* ConfigError for one that begins none."""
    if unknown := [prefix for prefix in only if not any(name.startswith(prefix) for name in names)]:
        if len(names) > MOST_NAMED:
            parts = (name.rpartition("/") for name in names)
            names = [*dict.fromkeys(f"{start}/..." if start else name for start, _, name in parts)]
        raise ConfigError(f"only={','.join(unknown)}: no case starts with that; cases: {', '.join(names)}")
    return [name for name in names if not only or name.startswith(tuple(only))]


def run_cases(
    cases: Sequence[Case], brief: Callable[[Row], str], out: Path | None, only: Sequence[str] = (),
    earlier: Sequence[Row] = (), until: float = math.inf,
) -> list[Row]:  # fmt: skip
    """Run the chosen cases and return their rows, also in `rows_file` of ``out``; a failed case is a row.

    The last row of ``earlier`` that has a case's facts replaces it. Exits with status 0 before a case that
    would begin after ``until`` of time.monotonic. *Raises* ConfigError as `chosen` does.
    """
    names, rows = chosen([case.name for case in cases], only), list[Row]()
    cases = [case for case in cases if case.name in names]
    for number, case in enumerate(cases, start=1):
        if known := [row for row in earlier if case.about.items() <= row.items()]:
            rows.append(known[-1])
            continue
        if (started := time.monotonic()) > until:
            log.info("stopped before [%d/%d] %s; the same command goes on", number, len(cases), case.name)
            sys.exit()
        try:
            found = [{**case.about, "error": None, **row} for row in case.run()]
        except Exception as error:  # whatever a kernel, a job or the allocator may raise
            found = [{**case.about, "error": reason(error)}]
        seconds = time.monotonic() - started
        said = ", ".join(row["error"] or brief(row) for row in found)
        log.info("[%d/%d] %s: %s (%.1f s)", number, len(cases), case.name, said, seconds)
        keep(out, found)
        rows += found
        if any(row["error"] for row in found):  # a traceback holds its frames, and those the tensors
            gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return rows


def keep(out: Path | None, rows: Sequence[Row]) -> None:
    """Append rows to the file beside ``out``, for a suite that ends early."""
    try:
        if out is not None and is_first():
            with rows_file(out).open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        log.warning("intermediate results cannot be saved: %s", error)


def earlier_rows(out: Path | None) -> list[Row]:
    """Return the rows of an interrupted suite, without a line that it did not finish."""
    if out is None or not (file := rows_file(out)).exists():
        return []
    whole, end, _ = file.read_bytes().rpartition(b"\n")
    os.truncate(file, len(whole + end))
    return [json.loads(line) for line in whole.splitlines()]


def rows_file(out: Path) -> Path:
    return out.with_suffix(".rows.jsonl")


def is_first() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


class Scaled(string.Formatter):
    """String formatter with scales ``{size:Gi*.2f}``, texts for true values ``{late:? miss}``, and lists."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec.startswith("?"):
            return format_spec[1:] if value else ""
        if isinstance(value, (list, dict)):
            return ", ".join(value) or "none"
        scale, _, form = format_spec.rpartition("*")
        return format(value * SCALES[scale] if scale else value, form)


def table(columns: str, rows: Sequence[Row], shown: Callable[[Row], Row] = dict) -> Iterator[str]:
    """Yield lines of a Markdown table; a failed row has its first cells and the reason."""
    heads, forms = zip(*(column.split(": ", 1) for column in columns.split(" | ")), strict=True)
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        cells = [_cell(form, row if row["error"] else shown(row)) for form in forms]
        if row["error"]:
            named = cells.index(None)
            cells[named:] = [f"failed: {row['error'].replace('|', '/')}", *[""] * (len(cells) - named - 1)]
        yield f"| {' | '.join(cell or '' for cell in cells)} |"
    yield ""


def _cell(form: str, row: Row) -> str | None:
    try:
        return Scaled().vformat(form, (), row)
    except (KeyError, TypeError):  # None has no format of numbers
        return None


def layers(full: bool) -> dict[str, MlpShape]:
    return {label: sizes[0 if full else 1] for label, sizes in LAYERS.items()}


def normal(generator: torch.Generator, *size: int, scale: float = 1.0) -> Tensor:
    return torch.randn(size, generator=generator, device=generator.device).mul_(scale).bfloat16()


def route(
    T: int, E: int, K: int, generator: torch.Generator, *, skewed: bool = False
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return experts, plan (slot_R, row_TK, ends_E) and weights [T, K] fp32 of a routing by random logits.

    Skewed: exactly ``SKEW * T * K / E`` tokens, a whole number of at most T, choose expert 0.
    """
    from graphmoe.ops import permute  # noqa: F401  # registers the ops

    logits_TE = torch.randn(T, E, generator=generator, device=generator.device)
    choice_TE = logits_TE.clone()
    if skewed:
        num_busy, rest = divmod(SKEW * T * K, E)
        assert rest == 0 and num_busy <= T, (T, E, K)
        order_T = torch.randperm(T, generator=generator, device=generator.device)
        choice_TE[:, 0] = -torch.inf
        choice_TE[order_T[:num_busy], 0] = torch.inf
    expert_TK = choice_TE.topk(K, dim=-1).indices
    weight_TK = logits_TE.softmax(dim=-1).gather(1, expert_TK)
    expert_TK = expert_TK.int()
    _, ends_E, row_TK, slot_R = torch.ops.graphmoe.routing_plan(expert_TK, E)
    return expert_TK, (slot_R, row_TK, ends_E), weight_TK


def mlp_inputs(
    shape: MlpShape, generator: torch.Generator, *directions: str, skewed: bool = False
) -> list[list[Tensor]]:
    """Return for each direction the arguments of `call_op` before the backend, all of one routing."""
    _, plan, weight_TK = route(shape.T, shape.E, shape.K, generator, skewed=skewed)
    return [random_inputs(direction, shape, weight_TK, plan, generator) for direction in directions]
