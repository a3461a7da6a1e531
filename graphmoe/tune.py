"""Fit, scale, profile and retune a run: short jobs on this machine, each changed by what the traces say.

python -m graphmoe.tune model=deepseek_v2_lite launch.nproc=4 parallel.ep=4 train.global_batch_size=32
python -m graphmoe.tune model=tiny data.seq_len=128 minutes=3

Keys of the command line are fixed; model, data and global batch never change. The projection proposes the
first candidates; without a known card the climb starts from the run as given. The wall of the fastest
candidate, by a trace of its last steps, selects the `MOVES` to try. The climb ends when none gains more than
`NOISE`, or with the time. The best two are then repeated alternately, and their medians decide.
"""

import contextlib
import logging
import math
import re
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

from graphmoe.bench import NOISE
from graphmoe.command.hydra import compose_config, read_words
from graphmoe.config.arguments import emit, parse_args, run_tool
from graphmoe.config.ranges import OWN_CODE, fields_of, spelled
from graphmoe.config.schema import ConfigError, RunConfig
from graphmoe.config.untrusted import read_json
from graphmoe.project import arguments
from graphmoe.project.arguments import DATA, FP8, GLOBAL_BATCH, NAMES_DATA, ProjectArgs, fixed_keys
from graphmoe.run.files import write_json
from graphmoe.runtime.host.signals import Interrupted, ends_at_signals

if TYPE_CHECKING:
    from graphmoe.bench.jobs import RunCase

log = logging.getLogger(__name__)
PROG = "graphmoe.tune"
EXAMPLES = [line for line in (__doc__ or "").splitlines() if line.startswith("python")]
TIMED, RECORDED = 8, 2  # steps of a job after its warm-up; the recorded ones are the last
PLAUSIBLE = 0.9  # of the best projected speed: projections of time are wrong by up to 10%
ROUNDS = 2  # in which the best two candidates are repeated
LIMIT_S = 300  # after which a job has hung, even if the tool has less time left
TOO_LARGE = re.compile(r"out of memory|OutOfMemory|take (at least )?[\d.]+ GiB", re.IGNORECASE)
SETTINGS = (
    "optim.lr=1e-6", "train.tokens=null", "train.epochs=null", "checkpoint.resume_from=null",
    "launch.max_restarts=0", "launch.write_only=false", "log.wandb=false", "log.mlflow=false",
    "profile.ranks=[0]",
)  # fmt: skip
"""Keys of every job. At so small a learning rate, routing stays that of the initial weights."""
LARGER, SYMM, CAPTURED = "train.micro_batch_size=*2", "moe.dispatcher=symm", "graph.scope=full_iteration"
LITTLE, MORE = "recompute.ops=[layernorm]", "recompute.ops=[layernorm,mla_up_proj]"
ATTENTION, OVERLAPPED = "recompute.ops=[layernorm,core_attn]", f"{SYMM} pipeline.ep_overlap=true"
MOVES = {
    "memory": (f"{LARGER} {LITTLE}", LITTLE, f"{LARGER} {MORE}", MORE, f"{LARGER} {ATTENTION}",
               ATTENTION, "recompute.all=true", "pipeline.schedule=zbv", "parallel.ep=*2",
               "train.micro_batch_size=/2"),
    "exchange": (f"{OVERLAPPED} {CAPTURED}", OVERLAPPED, SYMM, f"{SYMM} moe.balance=replicas",
                 f"{SYMM} moe.transport=copy_engine", LARGER, "parallel.ep=/2"),
    "host": (CAPTURED, f"{SYMM} {CAPTURED}", "graph.scope=layer", "graph.scope=partial", LARGER),
    "compute": (LARGER, f"{LARGER} {LITTLE}", "recompute.all=false", CAPTURED, f"{FP8}=rowwise",
                "moe.experts=triton"),
}  # fmt: skip
"""Overrides to try by the wall of the fastest candidate; of equal projected gains the first comes first.

``*2`` and ``/2`` change the present value, and a key of recompute replaces all of them.
"""
USELESS = {  # keys that gain nothing, with the value of a key that makes them so
    "pipeline.schedule": "parallel.pp=1", "moe.experts": "run.device=cpu",
    "graph.scope": "graph.scope=full_iteration",  # nothing is left to capture
    "moe.transport": "pipeline.ep_overlap=true",  # which uses copy engines anyway
}  # fmt: skip
IMPLIED = {"graph": {"graph.scope"}, "recompute": {"recompute.all", "recompute.ops"}}
"""Keys that are fixed with any key of their section."""
RATE = "tokens_per_s_per_gpu"
COLUMNS = (
    "row: {number} | candidate: {name} | tokens/s/GPU: {tokens_per_s_per_gpu:,.0f} | of its jobs: {range} | "
    "GiB: {gib:.1f} | wall: {wall} | gain: {gain:+.1%} | tried because: {why}"
)
VARIED = {"graph", "moe", "parallel", "pipeline", "precision", "recompute", "train"}
"""Sections of the keys that candidates change."""
Changes = dict[str, str]  # a candidate's overrides by key, beside the user's
Row = dict[str, Any]  # a candidate with what its jobs measured, or the error


class StoredRow(TypedDict):
    number: int
    name: str
    why: str
    changes: Changes
    resolved: Changes
    overrides: list[str]
    projected_gb: float | None
    projected_rate: float | None
    rates: list[float]
    seconds: list[float]
    error: str | None
    tokens_per_s_per_gpu: NotRequired[float]
    range: NotRequired[str]
    gib: NotRequired[float]
    gain: NotRequired[float]
    wall: NotRequired[Literal["memory", "exchange", "host", "compute"]]
    why_wall: NotRequired[str]


class Stored(TypedDict):
    words: list[str]
    device: str
    num_ranks: int
    rows: list[StoredRow]
    winner: str | None


@dataclass
class TuneArgs:
    minutes: float = 10.0
    """Time for all jobs, > 0; a job that would end later is not started."""
    top: int = 3
    """Proposals of the projection to measure before the climb, > 0."""
    hardware: str | None = None
    """Card to project for, such as h200; default: this machine's, if projections know it."""
    try_fp8: bool = False
    """Try precision.fp8=rowwise too, which changes the numerics."""
    out: Path = Path("outputs/tune")
    """Folder of tune.json and tune.html. A second start for the same run continues from its rows."""


def main(argv: list[str]) -> None:
    own, words = arguments.split_words(argv, TuneArgs, PROG, EXAMPLES)
    args, words = parse_args(TuneArgs, own, prog=PROG), read_words(words, PROG)
    if not 0 < args.minutes < math.inf:
        raise ConfigError(f"minutes={args.minutes:g} must be above 0, such as minutes=10")
    logging.basicConfig(format="%(message)s", level=logging.INFO)  # on stderr
    tuning, status = Tuning(args, words), 0
    try:
        with ends_at_signals(""):
            tuning.run()
    except Interrupted as interrupted:
        status = interrupted.status
    lines = written(args.out / "tune.html", shlex.join(["python", "-m", PROG, *argv]), tuning.document)
    emit(tuning.document, "\n".join(lines), tuning.config.format)
    if status or not measured(tuning.rows):
        sys.exit(status or 1)


class Tuning:
    """Rows measured so far, and what is measured next. *Raises* ConfigError for a run that is refused."""

    def __init__(self, args: TuneArgs, words: Sequence[str]) -> None:
        import torch

        from graphmoe.bench import card_of_device
        from graphmoe.run.machine import device_name, memory_of

        self.args, self.words, self.config = args, [*words], compose_config(*words)
        launch, device = self.config.launch, torch.device(self.config.run.device.value)
        if launch.nodes not in ("auto", 1):
            raise ConfigError(f"launch.nodes={launch.nodes}: jobs train on this node only; leave it out")
        card = args.hardware
        with contextlib.suppress(ConfigError):  # nothing is projected for a card without rates
            card = card or (card_of_device(device).name if device.type == "cuda" else None)
        self.plan = ProjectArgs(card or "h200", search=True, top=args.top, try_fp8=args.try_fp8)
        arguments.check(self.plan, words)
        self.plan.place(launch, frozenset({"launch.nproc"}))
        self.card_gb = self.plan.card.memory_gb if card else math.inf
        if card and not args.hardware:  # as automatic keys count it
            self.card_gb = memory_of(device) / 1e9
        fixed = fixed_keys([*words, *([] if args.try_fp8 else [FP8])])
        self.fixed = fixed.union(*(IMPLIED.get(key.partition(".")[0], ()) for key in fixed))
        self.path, self.ends = args.out / "tune.json", time.monotonic() + 60 * args.minutes
        about = {"words": self.words, "device": device_name(device), "num_ranks": self.plan.num_ranks}
        self.document: dict[str, Any] = {**about, "rows": [], "winner": None}
        if self.path.exists():
            self.document = dict(read_json(self.path, Stored))
            for key, value in (each for row in self.document["rows"] for each in row["changes"].items()):
                if key.partition(".")[0] not in VARIED or OWN_CODE.fullmatch(value):
                    raise ConfigError(f"{self.path} changes {key} to {value}, which no job does; delete it")
        if {key: self.document.get(key) for key in about} != about:
            raise ConfigError(f"{self.path} is of another run or device; name another folder by out=...")
        self.rows: list[Row] = self.document["rows"]
        self.given: Changes = {}
        first = self.candidate({}, "given")
        assert first is not None
        self.given, self.first = first["resolved"], first | {"resolved": {}}
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        """Measure the run as given, proposals, and moves while they gain; then repeat the best two."""
        if not self.rows:
            self.measure(self.first)
        for changes in self.proposals():
            row = self.candidate(changes, "projection")
            if row and len(self.rows) <= self.args.top and self.fits(row) and self.has_time():
                self.measure(row)
        while self.has_time() and (row := self.next_move()):
            self.measure(row)
        if not self.has_time():
            log.info("minutes=%g are used up; the same command goes on from here", self.args.minutes)
        two = sorted(measured(self.rows), key=lambda row: row[RATE])[:-3:-1]  # the best first
        for row in two * ROUNDS if len(two) > 1 else []:
            if len(row["rates"]) <= ROUNDS and self.has_time(repeats=0):
                self.measure(row)

    def has_time(self, repeats: int = ROUNDS) -> bool:
        """Return if there is time for a job like those before, and for repeats of the best two."""
        spent = [seconds for row in measured(self.rows) for seconds in row["seconds"]] or [0.0]
        needed = statistics.median(spent) + repeats * min(spent) * (len(spent) > 1)
        return self.ends - time.monotonic() >= needed

    def fits(self, row: Row) -> bool:
        """Return if no candidate with as little projected memory ran out of it, or one with more ran."""
        failed = [other["projected_gb"] or math.inf for other in too_large(self.rows)]
        ran, gb = [other["projected_gb"] or 0.0 for other in measured(self.rows)], row["projected_gb"] or 0.0
        return gb < min([self.card_gb, *failed]) or gb <= max(ran, default=0.0)

    def proposals(self) -> list[Changes]:
        """Return the changes that the projection ranks first and that leave a margin of memory."""
        if self.card_gb == math.inf:
            return []
        from graphmoe.project.search import search

        words, lines = [*self.words, f"{GLOBAL_BATCH}={self.config.train.global_batch_size}"], list[Row]()
        with contextlib.suppress(ConfigError):  # such as a plug-in, whose costs are unknown
            fixed = fixed_keys([*words, "launch.nproc="])
            found = search(arguments.completed(self.config, self.plan, fixed), self.plan, words)
            lines = [line for line in (*found["shapes"][:2], *found["best"]) if line["fits_with_margin"]]
        least = PLAUSIBLE * max((line[RATE] for line in lines), default=0.0)
        proposed = [changes_of(line["words"]) for line in lines if line[RATE] >= least]
        return [changes for changes in proposed if not changes.keys() & self.fixed]

    def next_move(self) -> Row | None:
        """Return the untried move with the largest projected gain, first of the fastest row's wall."""
        best: Row | None = None
        for row in measured(self.rows):
            best = row if best is None or row[RATE] > (1 + NOISE) * best[RATE] else best
        if not (best or too_large(self.rows)):
            return None
        base = best or too_large(self.rows)[-1] | {"wall": "memory"}
        rate = (best and best["projected_rate"]) or 0.0
        others = [wall for wall in MOVES if best and wall != "memory"]  # whose moves cost speed
        for wall in dict.fromkeys([base["wall"], *others]):
            tried = [words for words in MOVES[wall] if best or LARGER not in words]
            moves = [self.candidate(self.moved(base, words), f"{wall}: {words}") for words in tried]
            fitting = [row for row in moves if row and self.fits(row)]
            least = PLAUSIBLE if wall == base["wall"] else 1 + NOISE  # of other walls only what is sure
            quick = [row for row in fitting if (row["projected_rate"] or math.inf) > least * rate]
            if quick:
                return max(quick, key=lambda row: float(row["projected_rate"] or 0.0))
        return None

    def moved(self, row: Row, words: str) -> Changes:
        """Return a row's changes after a move; none if that sets a fixed key or a useless one."""
        changes, now = dict(row["changes"]), self.given | row["resolved"]
        for key, value in changes_of(words).items():
            other, _, useless = USELESS.get(key, "run.device=").partition("=")
            if key in self.fixed or now[other] == useless:
                return {}
            if key in IMPLIED["recompute"]:
                changes = {each: changes[each] for each in changes if not each.startswith("recompute")}
            factor = {"*2": 2.0, "/2": 0.5}.get(value)
            changes[key] = value if factor is None else str(int(factor * int(now[key])))
        return changes

    def candidate(self, changes: Changes, why: str) -> Row | None:
        """Return a candidate's row before its first job; None if it was tried, or a rule refuses it."""
        from graphmoe.project.document import project

        changes = {k: v for k, v in sorted(changes.items()) if self.given.get(k, "none") != v}
        if self.given and any(row["changes"] == changes for row in self.rows):
            return None
        case = self.case(changes)
        if isinstance(case.config, ConfigError):
            if not self.given:
                raise case.config
            return None
        keys = {field.key: spelled(field.value) for field in fields_of(case.config)}
        keys = {key: value for key, value in keys.items() if self.given.get(key) != value}
        if any(row["resolved"] == keys for row in self.rows):
            return None
        row = {"name": _joined(changes) or "as given", "why": why, "changes": changes, "resolved": keys}
        row |= case.row | {"projected_gb": None, "projected_rate": None, "rates": [], "seconds": []}
        with contextlib.suppress(ConfigError):  # such as a plug-in, whose costs are unknown
            if self.card_gb < math.inf:
                document = project(case.config, self.plan)
                row |= {"projected_gb": document["memory_gb"]["total"], "projected_rate": document[RATE]}
        return {"number": len(self.rows) + 1, **row, "error": None}

    def case(self, changes: Changes) -> "RunCase":
        """Return the job of a candidate with these changes."""
        from graphmoe.bench import BenchArgs, SuiteName, jobs

        given = [*self.words, *([] if fixed_keys(self.words) & NAMES_DATA else [DATA]), *SETTINGS]
        args, device = BenchArgs(SuiteName.step, repeats=TIMED), self.config.run.device.value
        words = _joined(changes).split()
        return jobs.run_case(args, device, self.plan.per_node, "", {}, given, words, RECORDED)

    def measure(self, row: Row) -> None:
        """Run a job of the row, unless it has no chance; save all rows."""
        from graphmoe.bench.cases import reason, table

        started, gb = time.monotonic(), row["projected_gb"] or 0.0
        try:
            if gb > self.card_gb:
                raise ConfigError(f"out of memory: projected {gb:.1f} of {self.card_gb:g} GB")
            words = self.case(row["changes"]).row["overrides"]  # not those of a file
            row |= trained(self.config, words, max(self.ends - started, LIMIT_S))
            row["rates"].append(row[RATE])
            row[RATE] = statistics.median(row["rates"])
            row["range"] = f"{min(row['rates']):,.0f} to {max(row['rates']):,.0f}"
        except Exception as error:  # whatever a job, its trace or the system may raise
            if row["rates"]:  # a repeat, which does not undo what was measured
                log.warning("row %d failed when it was repeated: %s", row["number"], reason(error))
            else:
                row["error"] = reason(error).partition(". Tried to allocate")[0]
        row["seconds"].append(round(time.monotonic() - started, 1))
        self.rows += [] if row in self.rows else [row]
        done = measured(self.rows)
        for each in done:
            each["gain"] = each[RATE] / done[0][RATE] - 1
        if best := max(done, key=lambda row: row[RATE], default=None):
            self.document["winner"] = arguments.train_command(self.words, _joined(best["changes"]), self.plan)
        write_json(self.path, self.document)
        log.info("%s", [*table(COLUMNS, [row])][2])


def trained(config: RunConfig, words: Sequence[str], limit_s: float) -> Row:
    """Run a job; return its tokens/s/GPU, GiB and wall. *Raises* what the job or its trace may."""
    from graphmoe.bench import jobs
    from graphmoe.trace.summary import summarise, wall_of

    found = jobs.train(words, limit_s)
    assert found.trace is not None
    timed, summary = found.steps[-TIMED - RECORDED : -RECORDED], summarise(found.trace, 1)
    numbers = jobs.numbers_of_run(config, config.launch.nproc, timed, found.summary)
    if summary.idle is not None:  # while it records, the profiler slows the host
        busy_ms, step_ms = (1 - summary.idle) * summary.step_ms, numbers["median_ms"]
        summary = replace(summary, step_ms=step_ms, idle=max(0.0, 1 - busy_ms / step_ms))
    wall = wall_of(summary)
    named = {"wall": wall.name, "why_wall": wall.why} if wall else {"wall": "compute"}  # a CPU computes
    return {RATE: numbers["tokens_per_s"], "gib": max(numbers["peak_gib"], numbers["device_gib"]), **named}


def measured(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["error"] is None]


def too_large(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if TOO_LARGE.search(row["error"] or "")]


def _joined(changes: Changes) -> str:
    return " ".join(f"{key}={value}" for key, value in changes.items())


def changes_of(words: str) -> Changes:
    return dict(word.split("=", 1) for word in words.split())


def written(path: Path, command: str, document: dict[str, Any]) -> list[str]:
    """Write the page: the fastest candidate's command, charts and the table; return the lines to print."""
    from graphmoe.bench import cases
    from graphmoe.report.charts import bar_chart
    from graphmoe.web_page import grid, paragraph, table, write_page

    lines, done = [*cases.table(COLUMNS, document["rows"])], measured(document["rows"])
    names, fastest = [f"row {row['number']}" for row in done], document["winner"] or "no candidate ran"
    charts = [
        bar_chart(unit, f"{unit} of each candidate", {unit: [row[key] for row in done]}, names, unit, unit)
        for unit, key in (("tokens/s/GPU", RATE), ("GiB", "gib"))
    ]
    head, _, *cells = [line[2:-2].split(" | ") for line in lines[:-1]]
    content = grid(charts) + table(head, cells, numbers_from=2, numbers_to=5)
    header = paragraph(f"`{command}`") + paragraph(f"Fastest: `{fastest}`")
    title = f"graphmoe: tuned on {document['num_ranks']} x {document['device']}"
    write_page(path, title, header, [("", content)])
    return [*lines, "Fastest:", fastest]


if __name__ == "__main__":
    run_tool(main)
