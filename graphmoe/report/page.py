"""HTML page that reports one run."""

import dataclasses
import json
import logging
import math
import shlex
from collections import defaultdict
from pathlib import Path
from typing import Any

from graphmoe.config.choices import compute_words
from graphmoe.config.progress import working
from graphmoe.config.ranges import number_of, shown_size
from graphmoe.config.schema import ConfigError
from graphmoe.report.causes import threads_of
from graphmoe.report.charts import (
    bar_chart,
    expert_charts,
    memory_charts,
    memory_remarks,
    reached,
    speed_charts,
    training_charts,
)
from graphmoe.report.questions import NO_TRACE, questions, slow_ranks, unbalanced
from graphmoe.report.run_data import RunData, read_run
from graphmoe.run.files import PIPELINE_FILE, REPORT_FILE
from graphmoe.trace.events import read_trace, traces_of
from graphmoe.trace.summary import Summary, summarise
from graphmoe.web_page import (
    Chart,
    controls,
    folds,
    grid,
    paragraph,
    quoted,
    side_by_side,
    table,
    tiles,
    write_page,
)

log = logging.getLogger(__name__)

MAX_TRACE_BYTES = 16 * 2**20
"""Size of a compressed trace that is read when a run ends; larger ones take too long there."""
NO_STEPS = "No step of training is recorded yet: the run writes them every `train.log_interval` steps."
NO_EXPERTS = "No experts: the model has no MoE layer, or no step is recorded yet."


def write_report(folder: Path, to: Path | None = None, *, max_trace_bytes: float = math.inf) -> Path:
    """Write a run's page; return its path. *Raises* ConfigError if the folder is no run's."""
    run = read_run(folder)
    trace, warnings = trace_of(run, max_trace_bytes), "".join(map(paragraph, unbalanced(run)))
    sections = [
        ("Training", _charts(training_charts(run), NO_STEPS)),
        ("Sample", _sample(run)),
        (
            "Speed",
            "".join(map(paragraph, slow_ranks(run))) + _charts(speed_charts(run), NO_STEPS) + _rates(run),
        ),
        ("Memory", _charts(memory_charts(run), NO_STEPS) + memory_remarks(run)),
        ("Experts", warnings + _charts(expert_charts(run), NO_EXPERTS) + _loads_hint(run)),
        ("Segments", segments_section(trace)),
        ("Pipeline", pipeline_section(run)),
        ("Compilation", compile_section(run)),
        ("Capture", capture_section(run)),
        ("Configuration", _configuration(run)),
        ("Environment", _environment(run)),
    ]
    path, bar = to or folder / REPORT_FILE, controls({"": reached(run)}) if run.steps else ""
    header = questions(run, trace) + _header(run)
    write_page(path, f"graphmoe: {run.name}", header, [each for each in sections if each[1]], bar)
    return path


def _header(run: RunData) -> str:
    environment, summary = run.environment, run.summary
    validation, peak = summary.get("final_val_loss"), summary.get("peak_memory_gib")
    rate, mfu, tflops = run.tokens_per_s_per_rank(), run.median("mfu"), run.median("tflops")
    ranks, speed = f"{run.num_ranks} x " * (run.num_ranks > 1), f"{_number(tflops, '.4g')} TFLOP/s, median"
    after = "after the command" + f", last of {len(run.starts)} starts" * (len(run.starts) > 1)
    done, left = (summary.get(f"products_in_{kind}") for kind in ("fp8", "bf16"))
    share = "products" if done is None or left is None else f"{done} of {done + left} products"
    compute = compute_words(run.of("precision.compute") or "", run.of("precision.fp8") or "none", share)
    where = [environment.get("host"), threads_of(run) if run.of("run.device") == "cpu" else ""]
    entries = [
        ("model", run.of("model.name") or "?", ", ".join(filter(None, [compute, run.state]))),
        ("device", f"{ranks}{environment.get('device', '?')}", ", ".join(filter(None, where))),
        ("parallel layout", run.layout(), f"global batch {run.of('train.global_batch_size')}"),
        (f"tokens/s/{run.device_word}", _number(rate, ",.0f"), "median without the first step"),
        ("MFU", _number(mfu, ".1%"), "peak of the device is not known" if mfu is None else speed),
        ("final loss", _number(summary.get("final_loss"), ".4f"), f"validation {_number(validation, '.4f')}"),
        ("peak memory", f"{_number(peak, ',.2f')} GiB", "largest of all ranks"),
        ("first step", f"{_number(run.starts[-1] if run.starts else None, ',.1f')} s", after),
    ]
    command = environment.get("command")
    said = paragraph(f"`{shlex.join(command)}`") if isinstance(command, list) else ""
    damaged = f"Not readable: {', '.join(run.unreadable)}." if run.unreadable else ""
    return tiles(entries) + said + (paragraph(damaged) if damaged else "")


def _charts(charts: list[Chart], otherwise: str) -> str:
    return grid(charts) if charts else paragraph(otherwise)


def _rates(run: RunData) -> str:
    keys = ("step_s", "tokens_per_s", "tflops", "mfu")
    names = zip(keys, ("s per step", "tokens/s of all", "TFLOP/s of each", "MFU"), strict=True)
    known = [(name, f"{run.median(key):,.5g}") for key, name in names if run.median(key) is not None]
    return table(["median without the first step", ""], known, numbers_from=1) if known else ""


def _loads_hint(run: RunData) -> str:
    missing = run.steps and not run.expert_loads and run.steps[0].get("load_max_over_mean")
    return paragraph("No heat map: the run recorded no expert_load.jsonl.") if missing else ""


def trace_of(run: RunData, max_trace_bytes: float) -> Summary | str:
    """Return the summary of the run's trace, or a sentence that says why there is none."""
    try:
        (path,) = traces_of([run.folder], None)
    except ConfigError:
        return NO_TRACE
    if (size := path.stat().st_size) > max_trace_bytes:
        command = f"python -m graphmoe.report run={run.folder}"
        return f"The trace of {size / 2**20:.0f} MiB is not read when a run ends: `{command}` does."
    what = f"reading {path.name}, {size / 2**20:.1f} MiB, for the report"
    log.info("%s", what)
    try:
        with working(what):
            return summarise(read_trace(path), 1)
    except ConfigError as error:
        return f"No time by segment: {error}"


def segments_section(found: Summary | str) -> str:
    """Return a bar chart of a trace's segments or compiled units, or why there is none."""
    if isinstance(found, str):
        return paragraph(found)
    segments = list(dict.fromkeys(each.segment for each in found.segments))
    words = {"F": "forward", "I": "input gradients", "W": "weight gradients", "B": "backward", "": "other"}
    times: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(segments))
    for each in found.segments:
        times[words.get(each.part, each.part)][segments.index(each.segment)] = each.ms
    totals = {name: sum(of_part) for name, *of_part in zip(segments, *times.values(), strict=True)}
    most = max(totals, key=totals.__getitem__, default="")
    steps = number_of(found.num_steps, "step")
    alt = f"Time by segment of {steps} of {found.step_ms:.4g} ms; most is {most}"
    whose = "when any of its kernels runs" if found.on == "gpu" else "of the host"
    of_rank = f" of rank {found.facts['rank']}" if "rank" in found.facts else ""
    note = f"Mean of {steps}{of_rank}, {found.step_ms:,.4g} ms each; times {whose}."
    if found.idle is not None:
        note += f" The GPU is idle for {found.idle:.1%}."
    chart = bar_chart("Time by segment", alt, times, segments, "ms", "ms per step")
    return grid([dataclasses.replace(chart, is_wide=True, note=note)])


def compile_section(run: RunData) -> str:
    report = run.compiled
    if not report:
        return paragraph(
            "Nothing was compiled: `compile.enabled=false`."
            if run.of("compile.enabled") is False
            else "The run left no report of what it compiled."
        )
    cache, units = report.get("cache", {}), report.get("units", [])
    hits = cache.get("fx_hits", 0) + cache.get("aot_hits", 0)
    whole = sum(unit.get("source") != "compiled" for unit in units)
    graphs = number_of(report["graphs"], "graph")
    said = f"{graphs} in {report['seconds']:.1f} s, {report['recompiled']} compiled again. "
    said += f"Caches had {whole} of {number_of(len(units), 'unit')}; graphs in torch's: {hits}."
    reasons = dict.fromkeys(unit["why_compiled"] for unit in units if unit.get("why_compiled"))
    said += "".join(f" Compiled because: {reason}." for reason in reasons)
    passes = [
        [name, _matches(each), f"{each['nodes_before']} -> {each['nodes_after']}", _kept(each),
         f"{each['ms']:.1f}"]
        for name, each in report.get("passes", {}).items()
    ]  # fmt: skip
    of_units = [[u["unit"], f"{u['used']}x", u["graphs"], f"{u['seconds']:.1f}", u["source"]] for u in units]
    head = ["pass", "matches", "operations", "kept for backward", "ms"]  # as in the log of the run
    columns = ["unit", "used", "graphs", "seconds", "from"]
    tables = [
        table(head, passes, numbers_from=1, caption="Passes"),
        table(columns, of_units, numbers_from=1, caption="Compiled units"),
    ]
    return paragraph(said) + side_by_side(tables)


def capture_section(run: RunData) -> str:
    report = run.captured
    if not report:
        scope = run.of("graph.scope")
        if scope in (None, "none"):
            return paragraph(
                "Nothing is captured: `graph.scope=none`. A scope such as `graph.scope=layer` captures."
            )
        shown = scope if isinstance(scope, str) else f"[{','.join(scope)}]"
        return paragraph(f"`graph.scope={shown}` left no report: no step was captured.")
    where = "on the host, in place of a device's graphs" if report["on"] == "host" else "on the device"
    graphs, warmup = number_of(report["graphs"], "graph"), number_of(report["warmup_steps"], "step")
    said = f"`graph.scope={report['scope']}`: {graphs} {where} in {report['seconds']:.2f} s, "
    said += f"{report['pool_bytes'] / 2**20:,.0f} MiB in their pool; {warmup} before."
    rows = [
        [span["unit"], span["places"], span["graphs"], "" if span.get("nodes") is None else span["nodes"],
         f"{span['seconds']:.3f}"]
        for span in report["spans"]
    ]  # fmt: skip
    missing = report.get("not_captured", {}).items()
    return (
        paragraph(said)
        + table(["captured", "places", "graphs", "nodes", "seconds"], rows, numbers_from=1)
        + (table(["not captured", "why"], missing) if missing else "")
    )


def pipeline_section(run: RunData) -> str:
    """Return a chart of the last recorded pipeline step and its simulation; empty without a pipeline."""
    if (run.folder / PIPELINE_FILE).is_file():
        from graphmoe.pipeline_view.page import timeline_chart
        from graphmoe.pipeline_view.plans import recorded_panels

        try:
            return grid([timeline_chart(recorded_panels(run.folder, None, 0.0))])
        except ConfigError as error:
            return paragraph(f"No picture of the pipeline: {error}")
    hint = paragraph("No picture of the pipeline: `profile.pipeline=true` records one.")
    return hint * ((run.of("parallel.pp") or 1) > 1)


def _matches(each: dict[str, Any]) -> str:
    found, left = each["matches"], each.get("left", 0)
    return f"{found} of {found + left}" if left else str(found)


def _kept(each: dict[str, Any]) -> str:
    before, after = each.get("saved_bytes_before"), each.get("saved_bytes_after")
    return "-" if before is None or after is None else f"{shown_size(before)} -> {shown_size(after)}"


def _sample(run: RunData) -> str:
    written, prompt = run.summary.get("sample"), run.summary.get("sample_prompt")
    given = json.dumps(prompt, ensure_ascii=False).replace("`", "'") if prompt else ""
    said = f"Written by the model at the end of the run{f', from `{given}` on' if given else ''}."
    return paragraph(said) + quoted(written) if written else ""


def _configuration(run: RunData) -> str:
    groups: dict[str, list[tuple[str, str]]] = {}
    for key, value in run.flat_config().items():
        groups.setdefault(key.partition(".")[0] if "." in key else "others", []).append((key, value))
    if not groups:
        return paragraph("The run's folder has no resolved.yaml.")
    return folds((f"{name} ({len(rows)})", table([], rows)) for name, rows in groups.items())


def _environment(run: RunData) -> str:
    environment = dict(run.environment)
    packages = environment.pop("packages", None) or {}
    rows = [(key, value) for key, value in environment.items() if key != "command" and value is not None]
    rows += [(name, version) for name, version in packages.items() if version is not None]
    return table([], rows) if rows else paragraph("The run's folder has no env.json.")


def _number(value: float | None, form: str) -> str:
    return "?" if value is None else format(value, form)
