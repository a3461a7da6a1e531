"""Rules of the model's shape, its router and its experts: their parallelism and host syncs."""

import math
from collections.abc import Iterator, Sequence

from graphmoe.config.choices import EXPERTS_BACKENDS, LAYERS
from graphmoe.config.ranges import fields_of, range_rules, type_rules
from graphmoe.config.schema import (
    Balance,
    ComputeDtype,
    DispatchDtype,
    GroupScore,
    ModelConfig,
    PassesConfig,
    RopeScaling,
    RunConfig,
    ScoreFunction,
)
from graphmoe.config.untrusted import FileError
from graphmoe.plan.attention import attention_facts, is_hybrid, no_effect
from graphmoe.plan.experts import (
    INSTEAD,
    WORST_CASE,
    BufferLimits,
    dispatcher_facts,
    experts_of,
    has_experts,
    runs_pass,
)
from graphmoe.plan.forced_loads import LOADS, NO_LOAD, UNIT, read_counts
from graphmoe.plan.layout import divisors
from graphmoe.segments import CAPTURABLE, SYNC_FREE_STAGES, lowest_stage, segments_of, waiting_segments


def model_problems(model: ModelConfig) -> list[str]:
    """Return a message for each rule that a model alone violates."""
    fields = [field for field in fields_of(RunConfig(model=model)) if field.key.startswith("model.")]
    if unusable := [line for field in fields for line in type_rules(field)]:
        return unusable
    ranges = (line for field in fields for line in range_rules(field))
    config = RunConfig(model=model)
    return [*ranges, *model_rules(config), *router_rules(config)]


def model_rules(config: RunConfig) -> Iterator[str]:
    model = config.model
    if not model.num_experts and model.num_dense_layers != model.num_layers:
        yield (
            f"model.num_dense_layers={model.num_dense_layers} must equal model.num_layers with "
            f"model.num_experts=0, every layer dense; use model.num_dense_layers={model.num_layers}"
        )
    elif model.num_dense_layers > model.num_layers:
        yield (
            f"model.num_dense_layers={model.num_dense_layers} exceeds model.num_layers={model.num_layers}; "
            f"use 0 to {model.num_layers}"
        )
    elif model.num_experts > 0 and model.num_dense_layers < model.num_layers and not has_experts(model):
        yield (
            f"model.moe_every={model.moe_every} leaves no layer with experts of model.num_layers="
            f"{model.num_layers} after model.num_dense_layers={model.num_dense_layers}; use a smaller one"
        )
    yield from attention_facts(model).problems
    if is_hybrid(model) and model.attention != "gqa":
        yield (
            f"model.linear_attention={model.linear_attention.value} applies to model.attention=gqa only; use "
            f"model.linear_attention=none"
        )
    if model.rope_scaling is RopeScaling.yarn:
        if not 1 <= model.yarn_factor < math.inf:
            yield f"model.yarn_factor={model.yarn_factor} must be 1 or greater"
        if not model.yarn_beta_slow <= model.yarn_beta_fast < math.inf:
            yield (
                f"model.yarn_beta_fast={model.yarn_beta_fast} is below "
                f"model.yarn_beta_slow={model.yarn_beta_slow}; swap them"
            )
    if model.rope_scaling is RopeScaling.llama3:
        low, high = model.llama3_low_freq_factor, model.llama3_high_freq_factor
        if not 1 <= model.llama3_factor < math.inf:
            yield f"model.llama3_factor={model.llama3_factor} must be 1 or greater"
        if not low < high < math.inf:
            yield f"model.llama3_high_freq_factor={high} must exceed model.llama3_low_freq_factor={low}"


def router_rules(config: RunConfig) -> Iterator[str]:
    model = config.model
    experts, groups = model.num_experts, model.num_groups
    if experts < 1:
        return
    if model.top_k > experts:
        yield f"model.top_k={model.top_k} exceeds model.num_experts={experts}; use 1 to {experts}"
    if model.softmax_after_topk and model.score_function is not ScoreFunction.softmax:
        yield (
            f"model.softmax_after_topk=true needs model.score_function=softmax, "
            f"not {model.score_function.name}"
        )
    if model.softmax_after_topk and model.renormalise:
        yield no_effect("renormalise=true", "softmax_after_topk=true", "false")
    if model.shared_gate and not model.shared_ffn_size:
        yield no_effect("shared_gate=true", "shared_ffn_size=0", "false")
    if model.input_scaling and model.top_k != 1:
        yield (
            f"model.top_k={model.top_k} weights several outputs, and model.input_scaling=true scales the one "
            "input of a token; use model.top_k=1, or model.input_scaling=false"
        )
    if model.input_scaling and model.layer not in LAYERS.names:
        yield (
            f"model.layer={model.layer} may not send the scaled input of model.input_scaling=true; use "
            f"model.layer={LAYERS.names[0]}, or model.input_scaling=false"
        )
    if min(groups, model.topk_groups, model.top_k) < 1:
        return  # other rules refuse these
    if experts % groups:
        yield (
            f"model.num_groups={groups} does not divide model.num_experts={experts}; "
            f"use one of {divisors(experts)}"
        )
    elif model.topk_groups > groups:
        yield f"model.topk_groups={model.topk_groups} exceeds model.num_groups={groups}; use 1 to {groups}"
    elif model.group_score is GroupScore.topk_sum and groups > 1 and model.top_k % model.topk_groups:
        yield (
            f"model.group_score=topk_sum adds top_k / topk_groups scores, but model.top_k={model.top_k} is "
            f"not a multiple of model.topk_groups={model.topk_groups}; use one of {divisors(model.top_k)}"
        )
    elif model.topk_groups * (experts // groups) < min(model.top_k, experts):
        needed = math.ceil(model.top_k / (experts // groups))
        yield (
            f"model.topk_groups={model.topk_groups} leaves {model.topk_groups * (experts // groups)} experts "
            f"for model.top_k={model.top_k}; use model.topk_groups={needed} or more"
        )


def dispatch_rules(config: RunConfig) -> Iterator[str]:
    moe, parallel, model = config.moe, config.parallel, config.model
    for key, ranks, whole, size in (
        ("ep", parallel.ep, "num_experts", model.num_experts),
        ("etp", parallel.etp, "expert_ffn_size", model.expert_ffn_size),
    ):
        if ranks < 1 or size < 1:
            continue  # other rules refuse these
        if ranks > 1 and not has_experts(model):
            yield f"parallel.{key}={ranks} splits experts, but the model has none; use parallel.{key}=1"
        elif size % ranks:
            yield (
                f"model.{whole}={size} cannot be split over parallel.{key}={ranks}; use a divisor of {size}: "
                f"{', '.join(map(str, divisors(size)))}"
            )
    if moe.dispatcher == "local" and parallel.ep * parallel.etp > 1:
        yield (
            f"moe.dispatcher=local keeps tokens on their rank, which holds 1 / {parallel.ep} of the experts "
            f"and 1 / {parallel.etp} of each (parallel.ep, parallel.etp); use moe.dispatcher=auto or alltoall"
        )
    if moe.dispatcher == "symm" and parallel.ep * parallel.etp == 1:
        yield (
            "moe.dispatcher=symm exchanges between ranks that share the experts, and parallel.ep * "
            "parallel.etp is 1; use moe.dispatcher=auto or local"
        )
    if moe.experts == "te" and experts_of(config).experts_in_fp8 and has_experts(model):
        yield (
            f"moe.experts=te computes in bf16 only, not by precision.fp8={config.precision.fp8.value}: "
            f"Transformer Engine has no row scales, and blockwise needs multiples of 128 rows of each "
            f"expert, made from counts on the host; use moe.experts=auto, or precision.fp8_products without "
            f"experts"
        )
    yield from _expert_option_rules(config)
    if moe.dispatch_dtype is DispatchDtype.fp8 and (why := experts_of(config).no_fp8_rows):
        yield (
            f"moe.dispatch_dtype=fp8 sends fp8 rows to fp8 experts, but {why}; use "
            f"moe.dispatch_dtype=auto or bf16"
        )
    yield from _replica_rules(config)
    budget = moe.receive_budget
    is_number = type(budget) in (int, float) and 0 < budget < math.inf
    if budget != WORST_CASE and not is_number:
        yield f"moe.receive_budget={budget!r} must be a number greater than 0, or {WORST_CASE}"


def _expert_option_rules(config: RunConfig) -> Iterator[str]:
    model, moe, etp = config.model, config.moe, config.parallel.etp
    if model.expert_bias and etp > 1:
        yield (
            f"parallel.etp={etp} adds parts of an expert's result, and model.expert_bias=true would add its "
            f"bias {etp} times; use parallel.etp=1"
        )
    if moe.experts not in EXPERTS_BACKENDS.names and (model.expert_bias or model.swiglu_limit):
        given = "model.expert_bias=true" if model.expert_bias else f"model.swiglu_limit={model.swiglu_limit}"
        yield (
            f"moe.experts={moe.experts} may compute SwiGLU without biases or clamps, not {given}; use "
            f"moe.experts=auto or {' or '.join(EXPERTS_BACKENDS.names[1:])}"
        )


def load_rules(config: RunConfig) -> Iterator[str]:
    """Yield error messages about ``moe.expert_load``; reads the file that it names."""
    moe, name, top_k, most = config.moe, config.moe.expert_load, config.model.top_k, 2**31 // UNIT - 1
    if name == NO_LOAD:
        return
    if top_k > most:
        yield f"model.top_k={top_k} must be at most {most} where moe.expert_load={name} chooses"
    if moe.force_balance:
        yield f"moe.force_balance=true and moe.expert_load={name} both replace the router's choice; use one"
    if not has_experts(config.model):
        yield f"moe.expert_load={name} loads experts, and the model has none; use moe.expert_load=none"
    elif name not in LOADS and not name.endswith(".json"):
        yield (
            f"moe.expert_load={name}: there is no such load; use {', '.join((NO_LOAD, *LOADS))}, or the path "
            f"of a file that ends in .json"
        )
    elif name not in LOADS:
        try:
            read_counts(name, config.model.num_experts)
        except FileError as error:
            yield f"moe.expert_load: {error}"


def _replica_rules(config: RunConfig) -> Iterator[str]:
    moe, slots = config.moe, config.moe.replica_slots
    owned = config.model.num_experts // max(config.parallel.ep, 1)
    if moe.balance is Balance.replicas and (why := experts_of(config).no_replicas):
        needed = "moe.dispatcher=symm, or " if moe.dispatcher != "symm" else ""
        if config.parallel.ep <= 1:
            needed = "parallel.ep=2 or more, or "
        instead = f"{needed}moe.balance=none"
        yield f"moe.balance=replicas computes experts on further ranks, and {why}; use {instead}"
    if slots != "auto" and not (type(slots) is int and 0 < slots <= owned):
        yield (
            f"moe.replica_slots={slots!r} must be auto, or 1 to {owned}, the experts that a rank owns: more "
            f"are never needed"
        )


def one_node_rules(config: RunConfig) -> Iterator[str]:
    """Yield errors of dispatchers that work within one node only, if the number of ranks is known."""
    nproc, nodes = config.launch.nproc, config.launch.nodes
    sharing = config.parallel.ep * config.parallel.etp
    choice = config.moe.dispatcher
    if choice == "auto" or type(nproc) is not int or type(nodes) is not int:
        return
    facts = dispatcher_facts(choice)
    if not facts.one_node or (facts.buffer and sharing not in facts.buffer.ranks):
        return  # `vendor_dispatch_rules` refuses the latter
    # ranks that share experts are consecutive: they are on one node if it has whole groups of them
    if nodes > 1 and sharing > 0 and nproc % sharing:
        yield (
            f"moe.dispatcher={choice} exchanges between GPUs of one node, but a node's {nproc} ranks are "
            f"not a multiple of parallel.ep * parallel.etp = {sharing}; use a product that divides "
            f"{nproc}, or use moe.dispatcher=alltoall"
        )


def vendor_dispatch_rules(config: RunConfig) -> Iterator[str]:
    moe, parallel, model = config.moe, config.parallel, config.model
    key, ranks = f"moe.dispatcher={moe.dispatcher}", parallel.ep * parallel.etp
    if moe.dispatcher == "nvshmem" and (ranks < 2 or ranks & (ranks - 1)):
        yield (
            f"{key} splits an exchange evenly over 2, 4, 8, 16, ... ranks, but parallel.ep={parallel.ep} * "
            f"parallel.etp={parallel.etp} = {ranks}; use such a product, or {_instead(ranks)}"
        )
    limits = dispatcher_facts(moe.dispatcher).buffer
    if limits is None:
        return
    if parallel.etp > 1:
        yield (
            f"{key} sends a token to one rank per expert, but parallel.etp={parallel.etp} splits each "
            f"expert over several; use parallel.etp=1, or {INSTEAD}"
        )
    if parallel.ep not in limits.ranks:
        yield (
            f"{key} exchanges between 2, 4 or 8 ranks, not parallel.ep={parallel.ep}; use parallel.ep of "
            f"these, or {_instead(ranks)}"
        )
    elif model.num_experts > limits.experts * parallel.ep:
        yield (
            f"{key} supports at most {limits.experts} experts per rank, but model.num_experts="
            f"{model.num_experts} over parallel.ep={parallel.ep} is {model.num_experts // parallel.ep}; use "
            f"more ranks, or {INSTEAD}"
        )
    if config.precision.compute is ComputeDtype.fp32:
        yield f"{key} transfers bf16, not precision.compute=fp32; use precision.compute=bf16, or {INSTEAD}"
    yield from _row_rules(key, limits, model)


def _row_rules(key: str, limits: BufferLimits, model: ModelConfig) -> Iterator[str]:
    hidden, most = model.hidden_size, limits.hidden_most
    if hidden % limits.hidden_step or (most is not None and hidden > most):
        limit = "" if most is None else f", {most} at most"
        yield (
            f"{key} transfers rows of a multiple of {limits.hidden_step} values{limit}, not "
            f"model.hidden_size={hidden}; use such a size, or {INSTEAD}"
        )
    if model.top_k > limits.top_k:
        yield (
            f"{key} supports at most {limits.top_k} experts per token, not model.top_k={model.top_k}; use "
            f"{INSTEAD}"
        )


def _instead(ranks: int) -> str:
    return INSTEAD if ranks > 1 else "moe.dispatcher=auto"


def splits_backward(passes: PassesConfig) -> bool:
    return runs_pass(passes, "split_backward")


def overlap_rules(config: RunConfig) -> Iterator[str]:
    if not config.pipeline.ep_overlap:
        return
    choice = config.moe.dispatcher
    if not dispatcher_facts(choice).reads_peers:
        instead = (
            "moe.dispatcher=symm" if config.parallel.ep * config.parallel.etp > 1 else "parallel.ep=2 or more"
        )
        yield (
            f"pipeline.ep_overlap=true overlaps exchanges that do not sync with the host, and "
            f"moe.dispatcher={choice} has none; use {instead}"
        )
    if not config.compile.enabled:
        yield "pipeline.ep_overlap=true needs compiled units; use compile.enabled=true"
    if not splits_backward(config.passes):
        yield (
            "pipeline.ep_overlap=true needs dgrad and wgrad as separate calls; let the pass "
            "split_backward run (passes.enabled, passes.disabled)"
        )


def stage_rules(config: RunConfig) -> Iterator[str]:
    moe, parallel, scope, compiles = config.moe, config.parallel, config.graph.scope, config.compile.enabled
    stage = moe.sync_free_stage
    if stage != "auto" and (type(stage) is not int or stage not in SYNC_FREE_STAGES):
        yield f"moe.sync_free_stage={stage!r} must be auto, 0, 1, 2 or 3"  # True and 1.0 equal 1
    elif isinstance(scope, str | list) and has_experts(config.model):
        dispatcher = moe.dispatcher
        highest = dispatcher_facts(dispatcher).sync_free_stage
        why = f"moe.dispatcher={dispatcher} lets the host count the rows that arrive"
        alone = parallel.ep * parallel.etp == 1
        instead = f"moe.dispatcher={'local' if alone else 'symm'}"
        waiting = waiting_segments(scope, highest)
        if waiting:
            kept = _without(waiting, scope, compiles)
            yield (
                f"graph.scope={scope} captures {', '.join(waiting)}, and {why}; use graph.scope={kept}, or "
                f"{instead}"
            )
        elif stage != "auto" and stage > highest:
            yield (
                f"moe.sync_free_stage={stage} promises that dispatch does not wait for the host, and {why}; "
                f"use moe.sync_free_stage={highest} or auto, or {instead}"
            )
        elif stage != "auto":
            yield from _too_low(stage, scope, compiles)


def _too_low(stage: int, scope: str | list[str], compiles: bool) -> Iterator[str]:
    waiting = waiting_segments(scope, stage)
    if waiting:
        yield (
            f"graph.scope={scope} captures {', '.join(waiting)}, which may wait for the host at "
            f"moe.sync_free_stage={stage}; use moe.sync_free_stage={lowest_stage(scope)} or auto, or "
            f"graph.scope={_without(waiting, scope, compiles)}"
        )


def _without(waiting: Sequence[str], scope: str | list[str], compiles: bool) -> str:
    kept = [name for name in (segments_of(scope) or CAPTURABLE) if name not in waiting and compiles]
    return f"[{','.join(kept)}]" if kept else "none"
