"""Rules of the parallel dimensions for model and sequence sizes."""

import math
from collections.abc import Iterator

from graphmoe.config.choices import ATTENTIONS, LAYERS, OPTIMIZERS, look_up
from graphmoe.config.ranges import LEAST_FP32, MOST_FP32
from graphmoe.config.schema import (
    AttentionBackend,
    ComputeDtype,
    ConfigError,
    ContextMethod,
    DeltaNetBackend,
    DeviceChoice,
    MasterDtype,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from graphmoe.plan.attention import MAX_MASKED_HEAD, attention_facts, is_hybrid
from graphmoe.plan.experts import num_dense
from graphmoe.plan.layout import Layout, divisors
from graphmoe.plan.pipeline.schedules import schedule_of
from graphmoe.plan.rules.model import splits_backward
from graphmoe.segments import FULL_ITERATION

MOST_MICRO_BATCHES = 2**16
# backends that leave the kernel to us: a ring needs log-sum-exp, which others do not return
RING_BACKENDS = (AttentionBackend.auto, AttentionBackend.sdpa)


DEFAULT_SEQ_LEN = 4096


def seq_len_of(config: RunConfig) -> int:
    """Return the tokens of a sequence; ``data.seq_len`` may be null."""
    return config.data.seq_len or min(config.model.context_length, DEFAULT_SEQ_LEN)


def batch_rules(config: RunConfig) -> Iterator[str]:
    global_batch, micro_batch = config.train.global_batch_size, config.train.micro_batch_size
    if micro_batch < 1 or global_batch < 1:
        return
    if global_batch % micro_batch:
        below = divisors(global_batch, micro_batch)
        above = math.ceil(global_batch / micro_batch) * micro_batch
        yield (
            f"train.global_batch_size={global_batch} is not a multiple of "
            f"train.micro_batch_size={micro_batch}; use e.g. "
            f"train.micro_batch_size={below[-1]} or train.global_batch_size={above}"
        )


def rank_batch_rules(train: TrainConfig, layout: Layout, ranks: int) -> Iterator[str]:
    dp, together = layout.dp, train.micro_batch_size * layout.dp
    if together > 0 and train.global_batch_size > MOST_MICRO_BATCHES * together:
        yield (
            f"train.global_batch_size={train.global_batch_size} is {train.global_batch_size // together} "
            f"micro-batches per rank in each step; use at most {MOST_MICRO_BATCHES * together}, or a larger "
            f"train.micro_batch_size"
        )
    if dp > 1 and together > 0 and train.global_batch_size % together:
        kind = "workers (launch.nproc times launch.nodes)" if dp == ranks else "data-parallel ranks"
        yield (
            f"train.global_batch_size={train.global_batch_size} is not a multiple of train.micro_batch_size="
            f"{train.micro_batch_size} times {dp} {kind}; use a multiple of {together}"
        )


def pipeline_rules(config: RunConfig) -> Iterator[str]:
    """Yield an error for an unknown schedule, and for each key that conflicts with ``parallel.pp``."""
    parallel, schedule = config.parallel, config.pipeline.schedule
    try:
        splits = schedule_of(schedule).splits_backward
    except ConfigError as error:
        yield str(error)
        return
    if parallel.pp < 2:
        return
    if config.graph.scope == FULL_ITERATION and config.profile.pipeline:
        yield (
            f"profile.pipeline=true measures each action of a step, and graph.scope={FULL_ITERATION} replays "
            f"all of them at once; use profile.pipeline=false, or another graph.scope such as layer"
        )
    if splits and config.compile.enabled and not splits_backward(config.passes):
        yield (
            f"pipeline.schedule={schedule} needs dgrad and wgrad as separate calls; let the pass "
            f"split_backward run (passes.enabled, passes.disabled), or use pipeline.schedule=1f1b"
        )


def attention_rules(config: RunConfig) -> Iterator[str]:
    parallel, kind, facts = config.parallel, config.model.attention, attention_facts(config.model)
    for axis, size in {"tp": parallel.tp, "cp": parallel.cp}.items():
        if size > 1 and axis not in facts.axes:
            yield (
                f"parallel.{axis}={size} splits attention over ranks, but the facts of model.attention="
                f"{kind} have no {axis} in axes; use parallel.{axis}=1, or model.attention="
                f"{' or '.join(ATTENTIONS.names)}"
            )
    if parallel.cp > 1 and is_hybrid(config.model):
        yield (
            f"parallel.cp={parallel.cp} splits sequences, and layers with model.linear_attention="
            f"{config.model.linear_attention.value} read all positions in order; use parallel.cp=1"
        )
    if config.data.document_mask and (largest := max(facts.head, facts.value)) > MAX_MASKED_HEAD:
        yield (
            f"data.document_mask=true has kernels for heads up to {MAX_MASKED_HEAD}, and those of the model "
            f"have {largest} elements; use smaller heads{_or_unmasked(config)}"
        )
    of_fla = is_hybrid(config.model) and config.model.delta_net_backend is DeltaNetBackend.fla
    if config.data.document_mask and of_fla:
        yield (
            "model.delta_net_backend=fla counts the chunks of documents on the host, and is refused with "
            f"data.document_mask=true; use model.delta_net_backend=auto or triton{_or_unmasked(config)}"
        )
    if config.data.document_mask and not facts.documents:
        yield (
            f"data.document_mask=true gives attention first_BS, but the facts of model.attention={kind} do "
            f"not set documents; use model.attention={' or '.join(ATTENTIONS.names)}{_or_unmasked(config)}"
        )


def layer_rules(config: RunConfig) -> Iterator[str]:
    parallel, name = config.parallel, config.model.layer
    for axis, size in {"tp": parallel.tp, "cp": parallel.cp}.items():
        if name in LAYERS.names or size < 2:
            continue
        if axis not in look_up({}, name, "model.layer", tuple, "axes"):
            yield (
                f"parallel.{axis}={size} splits layers over ranks, but model.layer={name} has no {axis} "
                f"in axes; use parallel.{axis}=1, or model.layer={' or '.join(LAYERS.names)}"
            )
    if not config.data.document_mask or name in LAYERS.names:
        return
    if not look_up({}, name, "model.layer", bool, "documents"):
        yield (
            f"data.document_mask=true gives attention first_BS, but model.layer={name} does not set "
            f"documents; use model.layer={' or '.join(LAYERS.names)}{_or_unmasked(config)}"
        )


def _or_unmasked(config: RunConfig) -> str:
    return "" if config.data.source_facts.marks else ", or data.document_mask=false"


def tensor_parallel_rules(config: RunConfig) -> Iterator[str]:
    parallel = config.parallel
    if parallel.tp < 2:
        return
    for key, value, what in _shared(config.model, seq_len_of(config) if parallel.cp == 1 else 0):
        if value > 0 and value % parallel.tp:
            below = value - value % parallel.tp
            lower, upper = (below, below + parallel.tp) if below else (parallel.tp, 2 * parallel.tp)
            valid = " or ".join(map(str, divisors(value, parallel.tp)))
            yield (
                f"parallel.tp={parallel.tp} does not divide {key}={value}, the {what} that it splits; "
                f"use parallel.tp={valid}, or {key}={lower} or {upper}"
            )


def matrix_rules(config: RunConfig) -> Iterator[str]:
    """Yield an error for each key that shards matrices which the optimizer updates whole."""
    name, parallel = config.optim.name, config.parallel
    sharding = {key: getattr(parallel, key) for key in ("tp", "etp") if getattr(parallel, key) > 1}
    if not sharding or name == "adamw":
        return
    if name not in OPTIMIZERS.names and look_up({}, name, "optim.name", object, "matrices") is None:
        return
    for key, value in sharding.items():
        yield (
            f"parallel.{key}={value} shards matrices, which optim.name={name} updates whole; use "
            f"parallel.{key}=1, or optim.name=adamw"
        )


def clip_rules(config: RunConfig) -> Iterator[str]:
    """Yield an error for each key with which ``optim.qk_clip`` cannot bound logits, or change them."""
    model, clip = config.model, config.optim.qk_clip
    off, given = "or optim.qk_clip=0", f"optim.qk_clip={clip:g}"
    if not LEAST_FP32 <= clip <= MOST_FP32:
        return  # off, or refused by its range
    if config.optim.name != "muon":
        yield f"{given} belongs to Muon, and optim.name={config.optim.name}; use optim.name=muon, {off}"
    if clip <= (least := math.log(max(seq_len_of(config), 1))):
        yield (
            f"{given} is not above {least:.2f}, the log-sum-exp of data.seq_len={seq_len_of(config)} logits "
            f"of 0; use optim.qk_clip=100, {off}"
        )
    if model.qk_norm:
        yield (
            f"{given} scales weights of queries and keys, which model.qk_norm=true norms; use "
            f"model.qk_norm=false, {off}"
        )
    for key, known in (("attention", ATTENTIONS), ("layer", LAYERS)):
        if (value := getattr(model, key)) not in known.names:
            yield f"model.{key}={value} bounds no logits for {given}; use {' or '.join(known.names)}, {off}"


def storage_rules(config: RunConfig) -> Iterator[str]:
    """Yield an error for each key with which moments or weights cannot be stored as asked."""
    optim, precision = config.optim, config.precision
    if optim.offload and optim.qk_clip > 0:
        yield (
            f"optim.qk_clip={optim.qk_clip:g} scales master weights after the update, and optim.offload=true "
            f"has them in host memory then; use optim.qk_clip=0, or optim.offload=false"
        )
    on_cpu = config.run.device is DeviceChoice.cpu and config.launch.fake_world is None
    of_fp32 = precision.compute is ComputeDtype.fp32 or (precision.compute is ComputeDtype.auto and on_cpu)
    for key in ("master_dtype", "grad_dtype"):
        if of_fp32 and getattr(optim, key) != "fp32":
            yield (
                f"optim.{key}=bf16 needs bf16 weights, and those of precision.compute="
                f"{precision.compute.value} are fp32; use precision.compute=bf16, or optim.{key}=fp32"
            )
    if optim.qk_clip > 0 and optim.master_dtype is not MasterDtype.fp32:
        yield (
            f"optim.qk_clip={optim.qk_clip:g} scales weights by less than optim.master_dtype=bf16 resolves; "
            f"use optim.qk_clip=0, or optim.master_dtype=fp32"
        )


def context_method(parallel: ParallelConfig, model: ModelConfig) -> ContextMethod:
    if parallel.cp_method is not ContextMethod.auto:
        return parallel.cp_method
    return ContextMethod.ring if _undivided_heads(parallel, model) else ContextMethod.alltoall


def context_parallel_rules(config: RunConfig) -> Iterator[str]:
    """Yield errors of cp: sizes that it does not divide, attention that cannot run as a ring."""
    parallel, model, seq_len = config.parallel, config.model, seq_len_of(config)
    cp, tp = parallel.cp, parallel.tp
    if cp < 2 or tp < 1:
        return
    ring = context_method(parallel, model) is ContextMethod.ring
    masks = {
        "data.document_mask=true": config.data.document_mask,
        f"model.window={model.window}": model.window,
        f"model.attention_chunk={model.attention_chunk}": 0 < model.attention_chunk < seq_len,
        "model.attention_sinks=true": model.attention_sinks,
    }
    for key in (key for key, given in masks.items() if ring and given):
        heads = math.gcd(*(count for _, count, _ in _heads(model)))
        valid = " or ".join(str(n) for n in divisors(heads) if heads % (n * tp) == 0)
        yield (
            f"{key} cannot run with parallel.cp={cp} by parallel.cp_method=ring, whose kernels have no masks "
            f"or sinks; use parallel.cp_method=alltoall with parallel.cp={valid or 1}"
        )
    parts = cp * math.lcm(2, tp) if ring else cp * tp
    if seq_len % parts:
        below = seq_len - seq_len % parts
        wanted = " or ".join(str(length) for length in (below, below + parts) if length)
        chunks = f"{2 * cp} chunks, in shares of" if ring else "shares of"
        yield (
            f"data.seq_len={seq_len} cannot be cut into {chunks} parallel.cp={cp} * parallel.tp={tp} ranks: "
            f"it is not a multiple of {parts}; use data.seq_len={wanted}"
        )
    undivided = _undivided_heads(parallel, model)
    if not ring and undivided and undivided[1] % tp == 0:
        key, heads = undivided
        valid = " or ".join(str(n) for n in range(1, cp) if heads % (n * tp) == 0)
        yield (
            f"parallel.cp_method=alltoall splits heads over parallel.cp={cp}, which does not divide the "
            f"{heads / tp:g} that a rank of parallel.tp={tp} has of {key}={heads}; "
            f"use parallel.cp_method=ring{f', or parallel.cp={valid}' if valid else ''}"
        )
    if ring and model.attention_backend not in RING_BACKENDS:
        backends = ", ".join(backend.value for backend in RING_BACKENDS)
        yield (
            f"model.attention_backend={model.attention_backend.value} cannot attend to a part of the keys, "
            f"as parallel.cp={cp} by parallel.cp_method=ring needs; use one of: {backends}"
            + ("" if undivided else "; or parallel.cp_method=alltoall")
        )


def _undivided_heads(parallel: ParallelConfig, model: ModelConfig) -> tuple[str, int] | None:
    ranks = max(parallel.cp * parallel.tp, 1)
    return next(((key, count) for key, count, _ in _heads(model) if count % ranks), None)


def _heads(model: ModelConfig) -> Iterator[tuple[str, int, str]]:
    yield "model.num_heads", model.num_heads, "attention heads"
    groups = attention_facts(model).kv_heads
    if groups is not None:
        yield "model.num_kv_heads", groups, "key-value heads"


def _shared(model: ModelConfig, seq_len: int) -> Iterator[tuple[str, int, str]]:
    yield from _heads(model)
    if is_hybrid(model):
        yield "model.linear_key_heads", model.linear_key_heads, "key heads"
        yield "model.linear_value_heads", model.linear_value_heads, "value heads"
    if num_dense(model):
        yield "model.dense_ffn_size", model.dense_ffn_size, "width of the dense MLP"
    yield "model.vocab_size", model.vocab_size, "rows of embedding and head"
    yield "data.seq_len", seq_len, "tokens of a sequence"
