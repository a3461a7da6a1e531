"""Types of what a run leaves as JSON and YAML, for those that read a folder which anybody may have written.

Fields that are not named here are let by. Integers are below 2^53, which is what JSON's readers agree on.
"""

from __future__ import annotations

from typing import Annotated, Any, Required, TypedDict

from msgspec import Meta

Count = Annotated[int, Meta(ge=0, lt=2**53)]
Size = Annotated[int, Meta(ge=1, lt=2**53)]
Number = float | None
PROFILE_FOLDER = "profile"
"""Name of the folder of traces, in a run's folder."""
FACTS = "graphmoe"
"""Key in a trace of facts about the run."""
STEP = "ProfilerStep#"
"""Beginning of the name of a range that is a step."""


def trace_file(rank: int) -> str:
    """Name of a rank's trace."""
    return f"rank{rank}.trace.json.gz"


class MetricsRow(TypedDict, total=False):
    """A line of metrics.jsonl: a step of training, which has ``loss``, or a validation."""

    step: Required[Count]
    loss: Number
    val_loss: Number
    grad_norm: Number
    lr: Number
    tokens_per_s: Number
    tflops: Number
    mfu: Number
    memory_gib: Number
    step_s: Number
    tokens: Count
    epoch: Number
    mtp_loss: Number
    balance_loss: Number
    z_loss: Number
    router_entropy: Number
    load_max_over_mean: list[float] | None
    rank_load: Number
    receive_load: Number
    skipped: bool
    skipped_total: Count


class ExpertLoad(TypedDict):
    """A line of expert_load.jsonl: loads over their mean by layer and expert."""

    step: Count
    steps: Count
    load: Annotated[list[Annotated[list[float], Meta(min_length=1)]], Meta(min_length=1)]


class Summary(TypedDict, total=False):
    """summary.json."""

    finished: bool | None
    stopped_by: str | None
    steps: Count
    final_loss: Number
    first_val_loss: Number
    final_val_loss: Number
    best_val_loss: Number
    skipped_steps: Count
    median_step_s: Number
    median_tokens_per_s: Number
    median_tflops: Number
    median_mfu: Number
    peak_memory_gib: Number
    device_memory_gib: Number
    time_to_first_step_s: Number


class Environment(TypedDict, total=False):
    """The fields of env.json that are more than a line in a table."""

    command: list[str] | None
    packages: dict[str, str | None] | None
    num_workers: Size | None
    device: str | None
    host: str | None


class Section(TypedDict, total=False):
    """Keys of resolved.yaml that a page asks for, of all sections."""

    name: str | None
    device: str | None
    compute: str | None
    scope: str | list[str] | None
    enabled: bool | None
    steps: Count | None
    global_batch_size: Count | None
    num_experts: Count | None
    tp: Size | None
    cp: Size | None
    pp: Size | None
    ep: Size | None
    etp: Size | None


class Config(TypedDict, total=False):
    """Sections of resolved.yaml that a page asks for."""

    run: Section
    model: Section
    train: Section
    precision: Section
    parallel: Section
    compile: Section
    graph: Section


class ProjectedPlace(TypedDict, total=False):
    """GiB by kind on the ranks of a place along pp."""

    total: Required[float]
    params: float
    grads: float
    main_params: float
    moments: float
    activations: float
    buffers: float
    communication: float
    dispatch: float


class Projection(TypedDict, total=False):
    """projection.json."""

    places: list[ProjectedPlace]
    why_not: str


class Pass(TypedDict, total=False):
    matches: Required[int]
    nodes_before: Required[int]
    nodes_after: Required[int]
    ms: Required[float]
    saved_bytes_before: Number
    saved_bytes_after: Number


Unit = TypedDict(
    "Unit",
    {
        "unit": Required[str],
        "for": Required[str],
        "used": Required[int],
        "graphs": Required[int],
        "seconds": Required[float],
        "source": Required[str],
        "why_compiled": str | None,
    },
    total=False,
)


class Compiled(TypedDict, total=False):
    """compile_report.json."""

    graphs: Required[int]
    seconds: Required[float]
    recompiled: Required[int]
    cache: dict[str, int]
    passes: dict[str, Pass]
    units: list[Unit]


class Span(TypedDict, total=False):
    """A captured span of a step."""

    unit: Required[str]
    places: Required[int]
    graphs: Required[int]
    nodes: int | None
    seconds: Required[float]


class Captured(TypedDict, total=False):
    """capture_report.json."""

    on: Required[str]
    scope: Required[str]
    graphs: Required[int]
    seconds: Required[float]
    pool_bytes: Required[float]
    warmup_steps: Required[int]
    spans: Required[list[Span]]
    not_captured: dict[str, str]


class JobRecord(TypedDict, total=False):
    """job.json of a sweep."""

    number: Required[Count]
    overrides: Required[list[str]]
    status: Required[str]
    run_folder: str
    value: Number
    error: str | None
    pid: Annotated[int, Meta(ge=0, lt=2**31)]
    host: str


class SweepRecord(TypedDict, total=False):
    """sweep.json."""

    command: str | None
    resume: str | None
    jobs: list[dict[str, Any]]
