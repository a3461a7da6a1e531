"""Search for layouts of a model on a number of ranks: layouts that fit, and why the others do not run.

Memory of every candidate is projected. Candidates that fit are ranked by an estimate of their time, and the
best of them are projected exactly.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from graphmoe.config.ranges import number_of
from graphmoe.config.schema import ConfigError, Fp8Recipe, RunConfig
from graphmoe.plan.costs.hardware import Card
from graphmoe.plan.costs.rates import Speeds, rates_of
from graphmoe.plan.costs.sizes import refuse_unknown
from graphmoe.plan.rules.auto import presumed
from graphmoe.plan.rules.recompute import recompute_rules
from graphmoe.project.arguments import ProjectArgs, fixed_keys, train_command
from graphmoe.project.candidates import Candidate, Candidates, without_advice
from graphmoe.project.document import given, has_margin, project
from graphmoe.project.estimates import Estimates

PROJECTED = 5  # candidates that are projected whole beside as many as are listed
WITH_MARGIN = 5  # candidates with a margin that are projected whole at least
OF_SHAPE = 2  # candidates of each listed shape that are projected whole: the order of schedules is estimated
FASTER = 1.1  # than the layout shown before, so that a search shows a few lines
MANY_EP = 8  # ranks that share the experts in the layout that is shown beside a faster one
LEANER = 1.1  # share of the card up to which slower modes, which need less memory, are tried too
GAIN = 1.005  # of a variant that is listed
REFINED = 4  # fastest candidates whose variants are projected exactly
COPIED = (
    "layout", "pipeline", "micro_batch_size", "micro_batches", "memory_gb", "left_gb", "fits_with_margin",
    "worst_rank", "step_time_s", "tokens_per_s_per_gpu", "bubble", "mfu", "fp8",
)  # fmt: skip


class Fitting(NamedTuple):
    candidate: Candidate
    total_gb: float
    tokens_per_s_per_gpu: float


Rejected = dict[str, Any]
"""Candidate that does not run: its overrides, the reason, and GB of the worst rank if it is too large."""


def search(
    config: RunConfig, args: ProjectArgs, words: Sequence[str],
    report: Callable[[str], None] = lambda _: None, show: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Search; return all candidates as plain values. Keys of a run set in ``words`` stay fixed.

    For each layout, schedule and micro-batch size it keeps the fastest recompute that fits; if that leaves
    no margin, the fastest that leaves one; if none fits, the smallest. ``report`` receives progress in words,
    ``show`` a line for each layout with a margin that is `FASTER` than the last. *Raises* ConfigError.
    """
    plain, fixed = presumed(config), fixed_keys([word for word in words if not word.endswith("=auto")])
    refuse_unknown(plain)
    tried, card = Candidates(config, args, fixed), args.card
    estimates = Estimates(plain, tried.kinds, Speeds(card, rates_of(card, args.rates), adding=1.0))
    fitting: list[Fitting] = []
    rejected: list[Rejected] = []
    shown = 0.0
    for found in _tried(tried, estimates, card):
        if isinstance(found, Fitting):
            fitting.append(found)
            if found.tokens_per_s_per_gpu > FASTER * shown and has_margin(found.total_gb, card):
                shown = found.tokens_per_s_per_gpu
                show(f"about {shown:,.0f} tokens/s/GPU, {found.total_gb:,.1f} GB: {found.candidate.words}")
        else:
            rejected.append(found)
        report(f"looking for layouts: {len(fitting):,} fit, {len(rejected):,} do not run")
    fitting.sort(key=lambda found: found.tokens_per_s_per_gpu, reverse=True)
    safe = [found for found in fitting if has_margin(found.total_gb, card)]
    in_bf16 = [found for found in safe if found.candidate.config.precision.fp8 is Fp8Recipe.none]
    shared = [found for found in safe if found.candidate.layout.ep >= MANY_EP]
    shapes: dict[object, list[Fitting]] = {}
    for found in safe:
        one = found.candidate.config
        key = found.candidate.layout, one.precision.fp8, one.moe.dispatcher
        shapes.setdefault(key, []).append(found)
    picked = [
        *fitting[: args.top + PROJECTED],
        *safe[:WITH_MARGIN],
        *in_bf16[: WITH_MARGIN * args.try_fp8],
        *shared[:OF_SHAPE],
        *(found for of_shape in [*shapes.values()][: args.top] for found in of_shape[:OF_SHAPE]),
    ]
    chosen = {id(found): found for found in picked}
    others = [found for found in fitting if id(found) not in chosen]
    report(f"projecting the fastest of {number_of(len(fitting), 'layout')}")
    lines = [_projected(found.candidate, args) for found in chosen.values()]
    pairs = zip(lines, chosen.values(), strict=True)
    fastest = sorted(pairs, key=lambda pair: float(pair[0]["tokens_per_s_per_gpu"]), reverse=True)[:REFINED]
    lines += [line for before, found in fastest for line in _refined(before, found.candidate, tried, args)]
    lines.sort(key=lambda line: float(line["tokens_per_s_per_gpu"]), reverse=True)
    with_margin = [line for line in lines if line["fits_with_margin"]]
    best_of_shapes: dict[object, dict[str, Any]] = {}
    for line in with_margin:  # fastest first
        shape = (*line["layout"].values(), line["fp8"])
        best_of_shapes.setdefault(shape, line)
    recommended = next(iter([*with_margin, *lines]), None)
    without_fp8 = next((line for line in with_margin if line["fp8"] == "none"), None)
    return {
        **given(config, args, tried.precisions[-1]),
        "micro_batch_sizes": tried.micro_batch_sizes,
        "try_fp8": args.try_fp8,
        "num_fitting": len(fitting),
        "num_simulated": len(chosen),
        "best": lines[: args.top],
        "shapes": [*best_of_shapes.values()][: args.top],
        "with_ep": next((line for line in with_margin if line["layout"]["ep"] >= MANY_EP), None),
        "recommended": recommended
        and {**recommended, "command": train_command(words, recommended["words"], args)},
        "without_fp8": without_fp8 if args.try_fp8 else None,
        "others_that_fit": [
            {
                "words": found.candidate.words,
                "total_gb": found.total_gb,
                "fits_with_margin": has_margin(found.total_gb, card),
                "about_tokens_per_s_per_gpu": found.tokens_per_s_per_gpu,
            }
            for found in others
        ],
        "rejected": rejected,
    }


def _projected(candidate: Candidate, args: ProjectArgs) -> dict[str, Any]:
    document = project(candidate.config, args)
    own = {"words": candidate.words, "recompute": candidate.kind}
    return {**own, **{key: document[key] for key in COPIED}}


def _refined(
    line: dict[str, Any], candidate: Candidate, tried: Candidates, args: ProjectArgs
) -> Iterator[dict[str, Any]]:
    """Yield what is faster than a projected candidate and leaves a margin, if that did."""
    for changes in tried.variants(candidate):
        for changed in changes:
            try:
                found = _projected(changed, args) if not any(recompute_rules(changed.config)) else None
            except ConfigError:  # no table of pairs for so few micro-batches
                continue
            if found and found["fits_with_margin"] >= line["fits_with_margin"] and found["left_gb"] >= 0:
                if found["tokens_per_s_per_gpu"] > GAIN * line["tokens_per_s_per_gpu"]:
                    yield found
                break


def _tried(tried: Candidates, estimates: Estimates, card: Card) -> Iterator[Fitting | Rejected]:
    for modes in tried.layouts():
        for layout, problems in modes:
            found = (
                [_rejected(layout, problems)] if problems else [*_of_layout(layout, tried, estimates, card)]
            )
            yield from found
            too_large = [one.get("total_gb", 0.0) for one in found if isinstance(one, dict)]
            fits = any(isinstance(one, Fitting) and has_margin(one.total_gb, card) for one in found)
            if fits or min(too_large, default=0.0) > LEANER * card.memory_gb:
                break


def _of_layout(
    layout: Candidate, tried: Candidates, estimates: Estimates, card: Card
) -> Iterator[Fitting | Rejected]:
    least = estimates.least_bytes(layout.layout) / 1e9
    if least > card.memory_gb:
        reason = f"weights, gradients and optimizer state alone are {least:,.1f} GB"
        yield _rejected(layout, [f"{reason}, {least - card.memory_gb:,.1f} too many"], least)
        return
    for scheduled in tried.scheduled(layout):
        yield from _with_micro_batches(scheduled, tried, estimates, card)


def _with_micro_batches(
    scheduled: Candidate, tried: Candidates, estimates: Estimates, card: Card
) -> Iterator[Fitting | Rejected]:
    for number, sized in enumerate(tried.sized(scheduled)):
        kinds = sorted(tried.kinds, key=lambda kind: estimates.model_seconds(tried.recomputing(sized, kind)))
        found = [*_with_recompute(sized, kinds, tried, estimates, card)]
        fitting = [one for one in found if isinstance(one, Fitting)]
        yield from fitting if number else found  # the smallest size has its reasons too
        if not fitting:
            return


def _with_recompute(
    scheduled: Candidate, kinds: Sequence[str], tried: Candidates, estimates: Estimates, card: Card
) -> Iterator[Fitting | Rejected]:
    try:
        estimates.pipeline(tried.recomputing(scheduled, kinds[0]))
    except ConfigError as error:
        yield _rejected(scheduled, [str(error)])
        return
    rejected: list[Rejected] = []
    is_found = False
    for kind in kinds:
        candidate = tried.recomputing(scheduled, kind)
        if problems := [*recompute_rules(candidate.config)]:
            rejected.append(_rejected(candidate, problems))
            continue
        pipeline = estimates.pipeline(candidate)
        place, memory = estimates.memory(candidate, pipeline)
        total = sum(memory.values()) / 1e9
        if total > card.memory_gb:
            largest = max(memory, key=memory.__getitem__)
            reason = (
                f"most are {largest}, {memory[largest] / 1e9:,.1f} of {total:,.1f} GB of a rank at place "
                f"{place} of pp, {total - card.memory_gb:,.1f} too many"
            )
            rejected.append(_rejected(candidate, [reason], total))
        elif has_margin(total, card) or not is_found:
            is_found = True
            rate = estimates.tokens_per_s_per_gpu(candidate, pipeline)
            yield Fitting(candidate, total, rate)
            if has_margin(total, card):
                return
    if not is_found:
        yield min(rejected, key=lambda one: float(one.get("total_gb", "inf")))


def _rejected(candidate: Candidate, problems: Sequence[str], total_gb: float | None = None) -> Rejected:
    size = {} if total_gb is None else {"total_gb": total_gb}
    return {"words": candidate.words, "reason": "; ".join(map(without_advice, problems)), **size}
