"""Layouts of a model on a number of ranks: those that fit, fastest first, and why the others do not run.

Memory of every candidate is projected exactly. Its time has a bound, which a short table makes closer, and of
those that fit only as many are projected whole as the best need: once a bound is below the last of them, none
of the others can be among them.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from graphmoe.config.schema import ConfigError, RunConfig
from graphmoe.plan.costs.rates import rates_of, source_of_rates
from graphmoe.plan.costs.speeds import Speeds
from graphmoe.plan.rules.run import recompute_rules
from graphmoe.project.arguments import GLOBAL_BATCH, ProjectArgs, fixed_keys, train_command
from graphmoe.project.candidates import Again, Candidates, Shape, without_advice
from graphmoe.project.document import NOT_COUNTED, has_margin, project
from graphmoe.project.estimates import Estimates, Plan
from graphmoe.project.memory import refuse_unknown

COPIED = (
    "layout", "pipeline", "micro_batches", "memory_gb", "left_gb", "fits_with_margin", "worst_rank",
    "step_time_s", "bubble", "mfu",
)  # fmt: skip
"""Of a projection, what the document has of each of the best, beside `tokens_per_s_per_gpu`."""


@dataclass(frozen=True, eq=False)
class Fitting:
    """A candidate whose memory the card has. Equal to itself alone: a key of caches."""

    words: str
    config: RunConfig
    again: str
    """The words for what is computed again."""
    total_gb: float
    at_most: float
    """Tokens/s of a GPU that its projection does not exceed."""
    closer: Callable[[], float]
    """A closer bound, which takes longer."""


@dataclass(frozen=True)
class Rejected:
    """A candidate that does not run."""

    words: str
    reason: str
    total_gb: float | None = None
    """Where it is too large: what the worst rank needs."""


def search(
    config: RunConfig, args: ProjectArgs, words: Sequence[str], report: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """All candidates as plain values. ``words``: those of a run, whose keys stay as they are.

    Of each layout with its schedule there is the kind of recompute that takes least time and fits, where that
    leaves no margin also the one that takes least time and does, or else the one that needs least memory.
    ``report`` is told how far the search is. *Raises* ConfigError.
    """
    refuse_unknown(config)
    fitting: list[Fitting] = []
    rejected: list[Rejected] = []
    for found in _Search(config, args, fixed_keys(words)).candidates():
        if isinstance(found, Fitting):
            fitting.append(found)
        else:
            rejected.append(found)
        report(f"looking for layouts: {len(fitting):,} fit, {len(rejected):,} do not run")
    report(f"projecting the fastest of {len(fitting):,} layouts")
    shown = functools.cache(functools.partial(_shown, args))
    best, others = _fastest(fitting, args.top, shown)
    with_margin, _ = _fastest([f for f in fitting if has_margin(f.total_gb, args.card)], 1, shown)
    recommended = next(iter(with_margin or best), None)
    return {
        "model": config.model.name,
        "hardware": args.card.name,
        "nodes": args.nodes,
        "num_ranks": args.num_ranks,
        "seq_len": config.data.seq_len,
        "micro_batch_size": config.train.micro_batch_size,
        "global_batch_size": config.train.global_batch_size,
        "card_gb": args.card.memory_gb,
        "num_fitting": len(fitting),
        "num_simulated": len(fitting) - len(others),
        "best": best,
        "recommended": None
        if recommended is None
        else {**recommended, "command": train_command(words, recommended["words"], args)},
        "not_counted": list(NOT_COUNTED),
        "others_that_fit": [
            {
                "words": f.words,
                "total_gb": f.total_gb,
                "fits_with_margin": has_margin(f.total_gb, args.card),
                "at_most_tokens_per_s_per_gpu": f.at_most,
            }
            for f in others
        ],
        "rejected": [{key: value for key, value in asdict(r).items() if value is not None} for r in rejected],
        "rates": asdict(rates_of(args.card, args.rates)),
        "rates_from": source_of_rates(args.card, args.rates),
    }


def _fastest(
    fitting: list[Fitting], top: int, shown: Callable[[Fitting], dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[Fitting]]:
    """The ``top`` fastest, simulated, and all that were not simulated; both fastest first."""
    found: list[dict[str, Any]] = []
    waiting = [(-candidate.at_most, number, False) for number, candidate in enumerate(fitting)]
    heapq.heapify(waiting)
    while waiting:
        bound, number, is_close = waiting[0]
        if len(found) >= top and -bound < found[top - 1]["tokens_per_s_per_gpu"]:
            break
        heapq.heappop(waiting)
        candidate = fitting[number]
        if not is_close:
            heapq.heappush(waiting, (-candidate.closer(), number, True))
            continue
        found.append(shown(candidate))
        found.sort(key=lambda line: line["tokens_per_s_per_gpu"], reverse=True)
    others = [replace(fitting[number], at_most=-bound) for bound, number, _ in sorted(waiting)]
    return found[:top], others


def _shown(args: ProjectArgs, candidate: Fitting) -> dict[str, Any]:
    """What is listed of a candidate, from its whole projection."""
    document = project(candidate.config, args)
    rate = document["tokens_per_s_per_gpu"]
    shown = {"words": candidate.words, "recompute": candidate.again, "tokens_per_s_per_gpu": rate}
    return {**shown, **{key: document[key] for key in COPIED}}


class _Search:
    def __init__(self, config: RunConfig, args: ProjectArgs, fixed: frozenset[str]) -> None:
        self.tried = Candidates(config, args, fixed)
        self.again, self.card = self.tried.again(), args.card
        self.batch = (
            "" if GLOBAL_BATCH in fixed else f"{GLOBAL_BATCH}={config.train.global_batch_size}"
        )  # fmt: skip
        speeds = Speeds(args.card, rates_of(args.card, args.rates))
        self.estimates = Estimates(config, self.again, speeds, on_nvidia=args.card.is_nvidia)
        self.tokens = config.train.global_batch_size * (config.data.seq_len or 0) / args.num_ranks

    def candidates(self) -> Iterator[Fitting | Rejected]:
        for shape, problems in self.tried.shapes():
            least = self.estimates.least_bytes(shape.layout) / 1e9
            if problems:
                yield Rejected(shape.words, "; ".join(map(without_advice, problems)))
            elif least > self.card.memory_gb:
                reason = f"weights, gradients and optimizer state alone are {least:,.1f} GB"
                yield Rejected(shape.words, f"{reason}, {least - self.card.memory_gb:,.1f} too many", least)
            else:
                yield from self._of_shape(shape)

    def _of_shape(self, shape: Shape) -> Iterator[Fitting | Rejected]:
        """Of each schedule the kind of recompute that is fastest and fits."""
        numbers = sorted(
            range(len(self.again)), key=lambda number: self.estimates.model_seconds(shape, number)
        )
        for name, virtual_stages in self.tried.schedules(shape.layout.pp):
            of_schedule = self.tried.schedule_words(shape.layout.pp, name, virtual_stages)
            words = " ".join(filter(None, (shape.words, of_schedule)))
            plan = functools.partial(self.estimates.plan, shape, name, virtual_stages)
            try:
                plan(numbers[0])
            except ConfigError as error:
                yield Rejected(words, without_advice(str(error)))
                continue
            pipeline = replace(shape.config.pipeline, schedule=name, virtual_stages=virtual_stages)
            config = replace(shape.config, pipeline=pipeline)
            yield from self._of_plan(replace(shape, words=words, config=config), plan, numbers)

    def _of_plan(
        self, shape: Shape, plan_of: Callable[[int], Plan], numbers: list[int]
    ) -> Iterator[Fitting | Rejected]:
        least: Rejected | None = None
        is_found = False
        for number in numbers:
            again = self.again[number]
            config = replace(shape.config, recompute=again.config)
            words = " ".join(filter(None, (shape.words, again.words, self.batch)))
            problems = self._again_problems(again)
            if problems:
                least = least or Rejected(words, "; ".join(map(without_advice, problems)))
                continue
            plan = plan_of(number)
            place, memory = self.estimates.memory(shape, plan, number)
            total = sum(memory.values()) / 1e9
            if total <= self.card.memory_gb:
                if is_found and not has_margin(total, self.card):
                    continue  # slower than the one that was found, and as near the limit
                seconds = self.estimates.least_seconds(shape, plan, number)
                closer = functools.partial(self._at_most, shape, plan, number)
                yield Fitting(words, config, again.words, total, self._rate(seconds), closer)
                if has_margin(total, self.card):
                    return
                is_found = True
            elif least is None or least.total_gb is None or total < least.total_gb:
                least = Rejected(words, self._too_large(place, memory), total)
        if not is_found:
            assert least is not None
            yield least

    def _at_most(self, shape: Shape, plan: Plan, number: int) -> float:
        return self._rate(self.estimates.likely_seconds(shape, plan, number))

    def _rate(self, seconds: float) -> float:
        """Tokens/s of a GPU, a little more than rounding may lose."""
        return self.tokens / seconds * (1 + 1e-6)

    def _again_problems(self, again: Again) -> list[str]:
        config = self.tried.config
        return [*recompute_rules(again.config, config.model, config.compile.enabled)]

    def _too_large(self, place: int, memory: dict[str, float]) -> str:
        """What is largest, and by how much the card is exceeded."""
        total, largest = sum(memory.values()) / 1e9, max(memory, key=memory.__getitem__)
        return (
            f"most are {largest}, {memory[largest] / 1e9:,.1f} of {total:,.1f} GB of a rank at place {place} "
            f"of pp, {total - self.card.memory_gb:,.1f} too many"
        )
