"""What a trace says of training steps: time of segments, largest kernels, idle, communication, launches."""

from __future__ import annotations

from graphmoe.config.schema import ConfigError
from graphmoe.run.records import STEP
from graphmoe.segments import FULL_ITERATION
from graphmoe.trace.cpu import of_cpu
from graphmoe.trace.events import Trace
from graphmoe.trace.gpu import of_gpu
from graphmoe.trace.owners import owners_of
from graphmoe.trace.summary import UNKNOWN, Summary


def summarise(trace: Trace, num_kernels: int) -> Summary:
    """Read a trace's steps. *Raises* ConfigError for one without any."""
    if not trace.steps:
        raise ConfigError(f"{trace.path} has no range {STEP}..., so no steps; profile.steps records such")
    owners = owners_of(trace)
    summary = (of_gpu if trace.activities else of_cpu)(trace, owners, num_kernels)
    summary.notes += _notes(summary)
    return summary


def _notes(summary: Summary) -> list[str]:
    """What a reader must know to read the numbers."""
    units = {segment.segment for segment in summary.segments}
    notes = []
    if summary.on == "cpu":
        notes.append(
            "no GPU in this trace: times are the host's. What a row has beyond its operations is Python, and "
            "of several ranks waits for each other"
        )
    if FULL_ITERATION in units:
        notes.append(
            f"one graph has the whole step (graph.scope={FULL_ITERATION}), and its kernels say nothing of "
            f"segments; they are in one row by name. graph.scope=layer tells segments apart"
        )
    if any(".." in unit for unit in units):
        notes.append("a row such as attn..mlp is a compiled unit: its kernels are fused over its segments")
    if UNKNOWN.unit in units:
        notes.append(f"{UNKNOWN.unit}: kernels whose launch is not in the trace")
    return notes
