"""Names of a run's files, and types that validate their content, which is untrusted.

Unknown fields are ignored. Integers are below 2^53, on which JSON readers agree.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any, NotRequired, Required, TypedDict

from msgspec import Meta

from graphmoe.runtime.host.files import replace_text

CONFIG_FILE = "resolved.yaml"
ENVIRONMENT_FILE = "env.json"  # written when training begins
METRICS_FILE = "metrics.jsonl"
EXPERT_LOADS_FILE = "expert_load.jsonl"
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
PROJECTION_FILE = "projection.json"
TOKENIZER_FILE = "tokenizer.json"
# repeated in `graphmoe.runtime`, which cannot import this; a test compares them
COMPILE_FILE, CAPTURE_FILE, PIPELINE_FILE = "compile_report.json", "capture_report.json", "pipeline.json"
PROFILE_FOLDER = "profile"
FACTS = "graphmoe"  # key of facts about the run in a trace
# prefix of step ranges in a trace
STEP = "ProfilerStep#"

Count = Annotated[int, Meta(ge=0, lt=2**53)]
Size = Annotated[int, Meta(ge=1, lt=2**53)]
Number = float | None


def _record(required: str, **fields: Any) -> Any:
    needed = {name: Required[kind] for name, kind in fields.items() if name in required.split()}
    return TypedDict("Record", {name: NotRequired[kind] for name, kind in fields.items()} | needed)  # type: ignore[operator]


def _each(kind: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


MetricsRow = _record(
    "step",
    **_each(Number, "loss val_loss grad_norm lr tokens_per_s tflops mfu memory_gib epoch"),
    **_each(Number, "step_s start_s data_s validation_s checkpoint_s"),
    **_each(Number, "mtp_loss balance_loss z_loss router_entropy"),
    **_each(Number, "rank_load receive_load planned_rank_load replicas replica_gb attended_keys max_logit"),
    **_each(Count, "step tokens skipped_total trained_tokens slowest_rank"),
    **_each(Number, "slowest_own_s median_own_s"),
    slow_ranks=list[Count] | None,
    load_max_over_mean=list[float] | None,
    skipped=bool,
)
"""Line of metrics.jsonl: a training step, which has ``loss``, or a validation.

The first step of each start has ``start_s``, seconds from the command to its end. Of steps read together
from the device, the last has ``data_s``, ``validation_s`` and ``checkpoint_s`` since the previous read, and
on several ranks ``slowest_rank``, ``slowest_own_s`` and ``median_own_s``: its time without waits for others.
"""
_Loads = Annotated[list[float], Meta(min_length=1)]
# line of expert_load.jsonl: loads relative to the mean, by layer and expert
ExpertLoad = _record(
    "step steps load", step=Count, steps=Count, load=Annotated[list[_Loads], Meta(min_length=1)]
)
Summary = _record(
    "",
    finished=bool | None,
    **_each(str | None, "stopped_by sample sample_prompt"),
    **_each(Count, "steps skipped_steps dead_experts overfull_experts unbalanced_steps"),
    fp8=str | None,
    **_each(Count | None, "products_in_fp8 products_in_bf16"),
    **_each(Number, "final_loss first_val_loss final_val_loss best_val_loss median_step_s"),
    **_each(Number, "median_tokens_per_s median_tflops median_mfu peak_memory_gib device_memory_gib"),
    **_each(Number, "time_to_first_step_s data_s validation_s checkpoint_s"),
)
# structured fields of env.json
Environment = _record(
    "",
    command=list[str] | None,
    packages=dict[str, str | None] | None,
    **_each(Size | None, "num_workers workers_of_node threads usable_cores"),
    **_each(str | None, "device host OMP_NUM_THREADS"),
)
_Section = _record(
    "",
    **_each(str | None, "name device compute fp8"),
    scope=str | list[str] | None,
    enabled=bool | None,
    **_each(Count | None, "steps global_batch_size num_experts top_k"),
    **_each(Size | None, "tp cp pp ep etp"),
)
# keys of resolved.yaml that pages read
Config = _record("", **_each(_Section, "run model train precision parallel compile graph"))
_Place = _record(
    "total",
    **_each(float, "total params grads main_params moments activations buffers communication dispatch"),
)
# content of projection.json: GiB by kind, for the ranks at each pp index
Projection = _record("", places=list[_Place], why_not=str)  # type: ignore[valid-type]
_Pass = _record(
    "matches nodes_before nodes_after ms",
    **_each(int, "matches left nodes_before nodes_after"),
    ms=float,
    **_each(Number, "saved_bytes_before saved_bytes_after"),
)
_Unit = _record(
    "unit used graphs seconds source",
    **_each(str, "unit source"),
    **_each(int, "used graphs"),
    seconds=float,
    why_compiled=str | None,
)
Compiled = _record(
    "graphs seconds recompiled",
    **_each(int, "graphs recompiled"),
    seconds=float,
    cache=dict[str, int],
    passes=dict[str, _Pass],  # type: ignore[valid-type]
    units=list[_Unit],  # type: ignore[valid-type]
)
_Span = _record(
    "unit places graphs seconds", unit=str, **_each(int, "places graphs"), nodes=int | None, seconds=float
)
Captured = _record(
    "on scope graphs seconds pool_bytes warmup_steps spans",
    **_each(str, "on scope"),
    **_each(int, "graphs warmup_steps"),
    **_each(float, "seconds pool_bytes"),
    spans=list[_Span],  # type: ignore[valid-type]
    not_captured=dict[str, str],
)
JobRecord = _record(
    "number overrides status",
    number=Count,
    overrides=list[str],
    **_each(str, "status run_folder host"),
    value=Number,
    error=str | None,
    pid=Annotated[int, Meta(ge=0, lt=2**31)],
)
SweepRecord = _record("", **_each(str | None, "command resume"), jobs=list[dict[str, Any]])


def trace_file(rank: int) -> str:
    return f"rank{rank}.trace.json.gz"


def write_json(path: Path, document: dict[str, Any]) -> None:
    replace_text(path, to_json(document))


def to_json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2) + "\n"


def display_path(path: Path) -> str:
    """Return the path, relative to the working directory if it is inside that directory."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def hydra_value(text: str) -> str:
    """Return a value, quoted for Hydra's grammar if it needs quotes."""
    return text if re.fullmatch(r"[A-Za-z0-9_/.@-]+", text) else "'" + text.replace("'", r"\'") + "'"
