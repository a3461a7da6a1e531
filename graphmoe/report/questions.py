"""Three answers at the top of a report: does the run learn, how fast is it, what takes its time."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator

from graphmoe.config.ranges import number_of
from graphmoe.report.causes import EAGER, MANY, Cause, causes, likely, more, share_of_steps, shares
from graphmoe.report.charts import Curve, curve
from graphmoe.report.run_data import RunData
from graphmoe.run.expert_loads import WINDOW, watch_rows
from graphmoe.run.metrics_file import SLOW
from graphmoe.trace.summary import Summary
from graphmoe.web_page import cards

Answer = tuple[str, list[str]]
_SEGMENTS = {
    "embed": "the embedding",
    "attn": "attention",
    "mlp": "the dense MLP",
    "moe_router": "the router",
    "moe_preprocess": "the routing plan",
    "moe_dispatch": "the dispatch of tokens",
    "moe_experts": "the experts",
    "moe_combine": "the experts' combine",
    "shared_experts": "the shared experts",
    "loss": "the head and loss over the vocabulary",
    "optimizer": "the update of weights",
    "(no segment)": "what is in no segment",
}
NO_TRACE = "No time by segment: `profile.steps` records a trace of some steps, which has it."
FEW_STEPS = 100
"""Steps below which a flat loss may still fall."""


def questions(run: RunData, trace: Summary | str) -> str:
    """Return the questions with their answers as cards; ``trace`` is a text if there is no trace."""
    entries = {
        "Does it learn?": learning(run),
        "How fast is it, against the floor?": speed(run),
        "Where does the time go?": times(run, trace),
    }
    return cards((question, *answer) for question, answer in entries.items())


def learning(run: RunData) -> Answer:
    """Return whether the run learns: first and last losses, and whether they still fall."""
    training, checks = curve("", run.steps, "loss"), curve("", run.validations, "val_loss")
    if not run.steps:
        return "Not known yet", ["No step of training is recorded."]
    said = [*unbalanced(run), *_skips(run)]
    if run.steps[-1].get("loss") is None or not training.values:
        since = training.steps[-1] + 1 if training.steps else run.steps[0]["step"]
        return "No: the loss is not finite", [
            f"It is no number since step {since}; a lower `optim.lr` or more `optim.warmup_steps` may help.",
            *said,
        ]
    name, seen = ("validation", checks) if len(checks.values) > 1 else ("training", training)
    tail = training.values[-max(1, len(training.values) // 10) :]
    first, last = seen.values[0], seen.values[-1] if seen is checks else statistics.fmean(tail)
    vocabulary = run.of("model.vocab_size")
    guess = f"; a guess among {vocabulary:,} tokens costs {math.log(vocabulary):.2f}" if vocabulary else ""
    tokens = run.steps[-1].get("tokens")
    length = number_of(run.steps[-1]["step"], "step") + (f" and {tokens:,} tokens" if tokens else "")
    said.insert(0, f"The {name} loss went from {first:.3f} to {last:.3f} in {length}{guess}.")
    said[1:1] = [*_memorising(run, checks, statistics.fmean(tail))]
    noise = 2 * statistics.stdev(tail) / math.sqrt(len(tail)) if len(tail) > 2 else 0.0
    if first - last <= max(0.01 * abs(first), noise):
        return f"No: the loss stays at {last:.3f}", said
    best = min(seen.values)
    if seen is checks and last > 1.005 * best:
        step = seen.steps[seen.values.index(best)]
        said.insert(1, f"At step {step:,} it was {best:.3f}.")
        return f"Not any more: validation is best at step {step:,}", said
    course, sentence = _course(training, checks)
    return f"Yes{course}", [said[0], sentence, *said[1:]]


def _course(training: Curve, checks: Curve) -> tuple[str, str]:
    count = len(training.values) // 5
    few = f"{len(training.values):,} steps are too few to say whether it still falls."
    if count < 5:
        return "", few
    before, after = training.values[-2 * count : -count], training.values[-count:]
    fall = statistics.fmean(before) - statistics.fmean(after)
    noise = 2 * math.sqrt((statistics.variance(before) + statistics.variance(after)) / count)
    side = f"{abs(fall):.3f} {'below' if fall > 0 else 'above'}"
    said = f"The training loss of the last {count:,} steps is {side} that of the {count:,} before"
    if fall > noise:
        return ", and it still falls", f"{said}."
    if fall < -noise:
        return ", but it rises at the end", f"{said}."
    said += ", which is within its noise"
    pairs = zip(checks.steps, checks.values, strict=True)
    earlier = [loss for step, loss in pairs if step <= training.steps[-count]]
    if earlier and checks.values[-1] < 0.995 * earlier[-1]:
        course = f"validation went from {earlier[-1]:.3f} to {checks.values[-1]:.3f} meanwhile"
        return ", and it still falls", f"{said}; {course}."
    if len(training.values) < FEW_STEPS:
        return "", f"{said}: {few}"
    return ", but it falls no more", f"{said}."


def _memorising(run: RunData, checks: Curve, training: float) -> Iterator[str]:
    epochs = run.steps[-1].get("epoch") or 0.0
    if epochs > 1.5 and checks.values and checks.values[-1] > training + 0.2:
        yield (
            f"It has read its data {epochs:.1f} times, and validation loss is "
            f"{checks.values[-1] - training:.2f} above training loss: it overfits. "
            f"More text helps, or fewer `train.steps`."
        )


def unbalanced(run: RunData) -> Iterator[str]:
    """Yield a warning if experts got no tokens, or nearly all, for some time."""
    found = watch_rows(run.expert_loads, run.of("model.top_k") or 1)
    if not found:
        return
    steps, last = sum(each.last - each.first + 1 for each in found), run.expert_loads[-1]["step"]
    ended = last - found[-1].last >= WINDOW
    till = f"for the last time up to step {found[-1].last:,}" if ended else "to the end"
    yield f"Warning: experts were dead or overfull in {number_of(steps, 'step')}, {till}. {found[-1]}."


def slow_ranks(run: RunData) -> Iterator[str]:
    """Yield a warning for each rank whose own work took longer than that of others for some time."""
    found: dict[int, list[int]] = defaultdict(list)
    for row in run.steps:
        for rank in row.get("slow_ranks") or ():
            found[rank].append(row["step"])
    for rank, steps in found.items():
        yield (
            f"Warning: rank {rank} was slow up to step {steps[-1]:,}: its own work took over {SLOW:g} times "
            f"the median of ranks. The log of step {steps[0]:,} has its host and GPU."
        )


def _skips(run: RunData) -> Iterator[str]:
    if skipped := run.steps[-1].get("skipped_total"):
        yield f"{number_of(skipped, 'step')} changed nothing, since loss or gradient was not finite."


def speed(run: RunData) -> Answer:
    seconds, rate, mfu = run.median("step_s"), run.tokens_per_s_per_rank(), run.median("mfu")
    if seconds is None or rate is None:
        return "Not known yet", ["No step of training is recorded."]
    each = f"{rate:,.0f} tokens/s on each {run.device_word}"
    said = [f"A step takes {seconds:.3g} s, the median: {each}."]
    tflops = run.median("tflops")
    if not mfu:
        reached = f" The model's arithmetic runs at {tflops:.3g} TFLOP/s." if tflops else ""
        unknown = "No floor: the peak of this device is not known, and `log.peak_tflops` sets it."
        return each, [*said, f"{unknown}{reached}"]
    peak = f" of {tflops / mfu:,.3g} TFLOP/s" if tflops else ""
    said.append(
        f"At the device's peak{peak} the model's FLOPs alone would take {seconds * mfu:.3g} s: that is the "
        f"floor, and its share of the step is the MFU, {mfu:.1%}."
    )
    return f"{1 / mfu:,.1f} times the floor", said


def times(run: RunData, trace: Summary | str) -> Answer:
    """Return where time goes: largest segments or, without trace, likeliest cause of lost time; advice."""
    if not run.steps:
        return "Not known yet", ["No step of training is recorded."]
    if isinstance(trace, str):
        most = likely(run)
        first = [most.said, *shares(run)]
        rest = [each for each in findings(run, trace) if each not in first]
        return _headline(most), [*first, *rest, more(run) if trace == NO_TRACE else trace]
    largest, answer = _largest(trace), "Not recorded"
    parts = ", ".join(f"`{name}` {ms / trace.step_ms:.0%}" for name, ms in largest[:4])
    said = f"Of a traced step of {trace.step_ms:,.4g} ms{' of the host' * (trace.on != 'gpu')}: {parts}."
    if largest:
        name, ms = largest[0]
        share, idle = ms / trace.step_ms, trace.idle or 0.0
        answer = f"Most in {_words(name)}: {share:.0%} of a step"
        if idle > max(0.25, share):
            answer = f"The GPU does nothing for {idle:.0%} of a step"
        if (most := likely(run)).share > max(idle, share) * share_of_steps(run):
            answer = _headline(most)
    return answer, [said, *shares(run), *([*findings(run, trace)] or ["Nothing stands out."])]


def _headline(cause: Cause) -> str:
    share = f", {cause.share:.0%} of the time" if cause.share else ""
    return f"Most likely: {cause.short}{share}"


def _largest(trace: Summary) -> list[tuple[str, float]]:
    sums: dict[str, float] = defaultdict(float)
    for each in trace.segments:
        sums[each.segment] += each.ms
    return sorted(sums.items(), key=lambda each: -each[1])


def _words(name: str) -> str:
    first, _, last = name.partition("..")
    words = [_SEGMENTS.get(each, each) for each in (first, last) if each]
    return words[0] if len(words) < 2 else f"the compiled unit from {words[0]} to {words[1]}"


def findings(run: RunData, trace: Summary | str) -> Iterator[str]:
    """Yield causes of lost time that the run's metrics show, each with what to try."""
    if isinstance(trace, Summary):
        yield from _lost(run, trace)
    yield from (each.said for each in causes(run))
    if run.of("compile.enabled") is False:
        yield EAGER
    recomputed = [key for key in ("all", "segments", "ops") if run.of(f"recompute.{key}")]
    room = _free_memory(run)
    if recomputed and room > 0.25:
        yield (
            f"Parts of the forward run again in the backward (`recompute.{recomputed[0]}`), while "
            f"{room:.0%} of the memory is free: recompute less."
        )
    elif not recomputed and room > 0.5 and _accumulates(run):
        yield f"{room:.0%} of the memory is free: a larger `train.micro_batch_size` makes larger kernels."


def _lost(run: RunData, trace: Summary) -> Iterator[str]:
    if trace.idle is not None and trace.idle > MANY:
        launches = f"{trace.launches:,.0f} launches in {trace.launch_ms:,.3g} ms of the host"
        instead = "`graph.scope=full_iteration` replays them from a graph"
        yield f"The GPU is idle for {trace.idle:.0%} of a step, with {launches}: {instead}."
    if trace.exposed_ms is not None and trace.exposed_ms > MANY * trace.step_ms:
        share = trace.exposed_ms / trace.step_ms
        layout, overlap = run.layout(), ""
        if "ep " in layout and not run.of("pipeline.ep_overlap"):
            overlap = " `pipeline.ep_overlap=true` runs the experts' exchange beside another micro-batch."
        yield (
            f"For {share:.0%} of a step ranks communicate and compute nothing ({layout}): `python -m "
            f"graphmoe.project search=true` looks for a layout that sends less.{overlap}"
        )


def _free_memory(run: RunData) -> float:
    # share of a GPU; 0 if it is not known
    peak, card = run.summary.get("peak_memory_gib"), run.summary.get("device_memory_gib")
    return 0.0 if run.of("run.device") == "cpu" or not peak or not card else 1 - peak / card


def _accumulates(run: RunData) -> bool:
    whole, each = run.of("train.global_batch_size"), run.of("train.micro_batch_size")
    return None not in (whole, each) and whole > each * run.num_ranks
