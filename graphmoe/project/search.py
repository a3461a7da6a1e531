"""Search for layouts of a model on a number of ranks: layouts that fit, and why the others do not run.

Memory of every candidate is projected. Candidates that fit are ranked by an estimate of their time, and the
best of them are projected whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from graphmoe.config.schema import ConfigError, RunConfig
from graphmoe.plan.costs.rates import Speeds, rates_of, source_of_rates
from graphmoe.plan.rules.run import recompute_rules
from graphmoe.project.arguments import ProjectArgs, fixed_keys, train_command
from graphmoe.project.candidates import Candidate, Candidates, without_advice
from graphmoe.project.document import NOT_COUNTED, has_margin, project
from graphmoe.project.estimates import Estimates, ShortPipeline
from graphmoe.project.memory import refuse_unknown

PROJECTED = 20
"""Candidates that are projected whole, or twice as many as are listed."""
WITH_MARGIN = 5
"""Candidates with a margin that are projected whole at least."""
COPIED = (
    "layout", "pipeline", "micro_batches", "memory_gb", "left_gb", "fits_with_margin", "worst_rank",
    "step_time_s", "tokens_per_s_per_gpu", "bubble", "mfu",
)  # fmt: skip
"""Keys of a projection that the document has for each of the best."""


@dataclass(frozen=True)
class Fitting:
    """A candidate that fits the card."""

    candidate: Candidate
    recompute: str
    total_gb: float
    tokens_per_s_per_gpu: float
    """Estimated throughput."""


@dataclass(frozen=True)
class Rejected:
    """A candidate that does not run."""

    words: str
    reason: str
    total_gb: float | None = None
    """GB of the worst rank, where the candidate is too large."""


def search(
    config: RunConfig, args: ProjectArgs, words: Sequence[str], report: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Return all candidates as plain values. Keys in ``words``, those of a run, stay as they are.

    Each layout with its schedule has the fastest kind of recompute that fits. Where that one leaves no
    margin, the fastest that leaves one is there too; where no kind fits, the one that needs least memory is.
    ``report`` gets the progress of the search in words. *Raises* ConfigError.
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
    fitting.sort(key=lambda found: found.tokens_per_s_per_gpu, reverse=True)
    count = max(PROJECTED, 2 * args.top)
    with_margin = [found for found in fitting if has_margin(found.total_gb, args.card)][:WITH_MARGIN]
    chosen = [*fitting[:count], *(found for found in with_margin if found not in fitting[:count])]
    report(f"projecting the fastest of {len(fitting):,} layouts")
    projected = sorted(
        (_projected(found, args) for found in chosen),
        key=lambda line: float(line["tokens_per_s_per_gpu"]),
        reverse=True,
    )
    best = projected[: args.top]
    recommended = next((line for line in projected if line["fits_with_margin"]), None)
    recommended = recommended or next(iter(best), None)
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
        "num_simulated": len(chosen),
        "best": best,
        "recommended": None
        if recommended is None
        else {**recommended, "command": train_command(words, recommended["words"], args)},
        "not_counted": list(NOT_COUNTED),
        "others_that_fit": [
            {
                "words": found.candidate.words,
                "total_gb": found.total_gb,
                "fits_with_margin": has_margin(found.total_gb, args.card),
                "about_tokens_per_s_per_gpu": found.tokens_per_s_per_gpu,
            }
            for found in fitting
            if found not in chosen
        ],
        "rejected": [{key: value for key, value in asdict(r).items() if value is not None} for r in rejected],
        "rates": asdict(rates_of(args.card, args.rates)),
        "rates_from": source_of_rates(args.card, args.rates),
    }


def _projected(found: Fitting, args: ProjectArgs) -> dict[str, Any]:
    """Return the listed values of a candidate, from its whole projection."""
    document = project(found.candidate.config, args)
    listed = {"words": found.candidate.words, "recompute": found.recompute}
    return {**listed, **{key: document[key] for key in COPIED}}


class _Search:
    def __init__(self, config: RunConfig, args: ProjectArgs, fixed: frozenset[str]) -> None:
        self.tried, self.card = Candidates(config, args, fixed), args.card
        speeds = Speeds(args.card, rates_of(args.card, args.rates), adding=1.0)
        self.estimates = Estimates(config, self.tried.kinds, speeds, on_nvidia=args.card.is_nvidia)
        self.tokens = config.train.global_batch_size * (config.data.seq_len or 0) / args.num_ranks

    def candidates(self) -> Iterator[Fitting | Rejected]:
        for layout, problems in self.tried.layouts():
            if problems:
                yield Rejected(layout.words, "; ".join(map(without_advice, problems)))
                continue
            least = self.estimates.least_bytes(layout.layout) / 1e9
            if least > self.card.memory_gb:
                reason = f"weights, gradients and optimizer state alone are {least:,.1f} GB"
                yield Rejected(layout.words, f"{reason}, {least - self.card.memory_gb:,.1f} too many", least)
            else:
                kinds = sorted(
                    range(len(self.tried.kinds)),
                    key=lambda kind: self.estimates.model_seconds(self.tried.recomputing(layout, kind)),
                )
                for scheduled in self.tried.scheduled(layout):
                    yield from self._of_schedule(scheduled, kinds)

    def _of_schedule(self, scheduled: Candidate, kinds: Sequence[int]) -> Iterator[Fitting | Rejected]:
        """Yield the fastest kind of recompute that fits, or the smallest where none does.

        Where the fastest leaves no margin, the fastest kind that leaves one comes too.
        """
        try:
            self.estimates.pipeline(self.tried.recomputing(scheduled, kinds[0]))
        except ConfigError as error:
            yield Rejected(scheduled.words, without_advice(str(error)))
            return
        rejected: list[Rejected] = []
        is_found = False
        for kind in kinds:
            candidate = self.tried.recomputing(scheduled, kind)
            run = candidate.config
            if problems := [*recompute_rules(run.recompute, run.model, run.compile.enabled)]:
                rejected.append(Rejected(candidate.words, "; ".join(map(without_advice, problems))))
                continue
            pipeline = self.estimates.pipeline(candidate)
            place, memory = self.estimates.memory(candidate, pipeline)
            total = sum(memory.values()) / 1e9
            if total > self.card.memory_gb:
                rejected.append(Rejected(candidate.words, self._too_large(place, memory), total))
            elif has_margin(total, self.card) or not is_found:
                is_found = True
                yield self._fitting(candidate, pipeline, total)
                if has_margin(total, self.card):
                    return
        if not is_found:
            yield min(rejected, key=lambda one: float("inf") if one.total_gb is None else one.total_gb)

    def _fitting(self, candidate: Candidate, pipeline: ShortPipeline, total_gb: float) -> Fitting:
        recompute = self.tried.kinds[candidate.kind].words
        rate = self.tokens / self.estimates.seconds(candidate, pipeline)
        return Fitting(candidate, recompute, total_gb, rate)

    def _too_large(self, place: int, memory: dict[str, float]) -> str:
        """Return what is largest, and by how much the card is exceeded."""
        total, largest = sum(memory.values()) / 1e9, max(memory, key=memory.__getitem__)
        return (
            f"most are {largest}, {memory[largest] / 1e9:,.1f} of {total:,.1f} GB of a rank at place {place} "
            f"of pp, {total - self.card.memory_gb:,.1f} too many"
        )
