"""Rules of the model's shape and router."""

import math
from collections.abc import Iterator

from graphmoe.config.ranges import fields_of, range_rules, type_rules
from graphmoe.config.schema import GroupScore, ModelConfig, RopeScaling, RunConfig, ScoreFunction
from graphmoe.plan.attention import attention_facts
from graphmoe.plan.layout import divisors


def model_problems(model: ModelConfig) -> list[str]:
    """Return the violated rules of a model alone."""
    fields = [field for field in fields_of(RunConfig(model=model)) if field.key.startswith("model.")]
    if unusable := [line for field in fields for line in type_rules(field)]:
        return unusable
    ranges = (line for field in fields for line in range_rules(field))
    config = RunConfig(model=model)
    return [*ranges, *model_rules(config), *router_rules(config)]


def model_rules(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.num_dense_layers > model.num_layers:
        yield (
            f"model.num_dense_layers={model.num_dense_layers} exceeds model.num_layers={model.num_layers}; "
            f"use 0 to {model.num_layers}"
        )
    yield from attention_facts(model).problems
    if model.rope_scaling is RopeScaling.yarn:
        if not 1 <= model.yarn_factor < math.inf:
            yield f"model.yarn_factor={model.yarn_factor} must be 1 or greater"
        if not model.yarn_beta_slow <= model.yarn_beta_fast < math.inf:
            yield (
                f"model.yarn_beta_fast={model.yarn_beta_fast} is below "
                f"model.yarn_beta_slow={model.yarn_beta_slow}; swap them"
            )


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
        yield "model.renormalise=true has no effect with model.softmax_after_topk=true; use renormalise=false"
    if groups < 1 or model.topk_groups < 1:
        return
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
            f"for model.top_k={model.top_k}; use topk_groups={needed} or more"
        )
