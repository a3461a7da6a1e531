"""GEMMs of a run that are in fp8: the FX passes that quantize them, their layers, and those left in bf16."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphmoe.config.formats import FORMATS
from graphmoe.config.schema import DispatchDtype, Fp8Measure, Fp8Recipe
from graphmoe.model.sizes import layer_weights
from graphmoe.ops.fp8_choice import ALL_IN_FP8, EXPERTS, Dense, Experts, InBf16, slower, speeds, to_text
from graphmoe.ops.grouped_mlp.choice import Memory
from graphmoe.plan.experts import is_moe, moe_layers
from graphmoe.plan.plan import Plan


def fp8_passes(plan: Plan, plain: InBf16 = ALL_IN_FP8) -> dict[str, dict[str, Any]]:
    """Return the fp8 passes with their parameters; empty without fp8."""
    precision, vendor = plan.precision, plan.fp8_vendor
    if precision.fp8 is Fp8Recipe.none:
        return {}
    dense = [name for name in precision.fp8_products if name != EXPERTS]
    passes: dict[str, dict[str, Any]] = {} if vendor and not dense else {"fp8_quantise": {}}
    if dense:
        shapes = [[*shape] for shape in plain.shapes]
        words = {"recipe": precision.fp8.value, "wgrad": precision.fp8_wgrad.value}
        passes["fp8_linear"] = {"products": dense, **words, "plain": shapes}
    if EXPERTS in precision.fp8_products and not plain.experts:
        passes["fp8_experts"] = {"recipe": precision.fp8.value, "vendor": vendor}
        if vendor is None:
            passes["fp8_quantise"] = {"dispatched": plan.fp8_rows, "has_room": plan.reads_peers}
    return passes


def keeps_experts(plan: Plan) -> bool:
    return bool({*moe_layers(plan.model)} - plan.fp8_skips)


def skips_experts(plan: Plan) -> bool:
    return any(is_moe(plan.model, layer) for layer in plan.fp8_skips)


def dense_products(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return the dense weights [N, K] that may run in fp8, one per shape, by name."""
    precision, model, shapes = plan.precision, plan.model, dict[tuple[int, int], dict[str, None]]()
    if precision.fp8 is Fp8Recipe.none:
        return {}
    aligned = FORMATS[precision.fp8].aligned
    for layer in sorted({*range(model.num_layers + model.mtp_depth)} - plan.fp8_skips):
        for path, weight in layer_weights(model, plan.layout, layer).items():
            product = next((name for name in precision.fp8_products if f".{name}." in path), None)
            if product and weight.dim() == 2 and not any(size % aligned for size in weight.shape):
                shapes.setdefault((weight.shape[0], weight.shape[1]), {})[product] = None
    return {f"{'+'.join(names)} {N}x{K}": (N, K) for (N, K), names in shapes.items()}


def measures(device: torch.device) -> bool:
    return device.type == "cuda"


def measured(
    plan: Plan,
    dense: Mapping[str, tuple[int, int]],
    experts: Callable[[], Experts] | None,
    known: Mapping[str, float],
    device: torch.device,
    memory: Memory,
) -> dict[str, float]:
    """Return fp8 speedups over bf16 by GEMM: ``known`` ones, and on a GPU measured others.

    ``experts`` makes the experts' benchmark case; None if they run in bf16 or vendor fp8. A forced fp8
    dispatch forces fp8 experts.
    """
    precision, dispatched = plan.precision, plan.moe.dispatch_dtype is DispatchDtype.fp8
    wanted = [*[EXPERTS] * (experts is not None and not dispatched), *dense]
    found = {name: known[name] for name in wanted if name in known}
    if precision.fp8_measure is Fp8Measure.none:
        return {}
    if not measures(device):
        return found  # fp8 is slow on a CPU, and for trying out only
    # A weight is multiplied by the rows of all ranks of tp.
    rows, wgrad, recipe = plan.tokens * plan.layout.tp, precision.fp8_wgrad.value, precision.fp8.value
    products: dict[str, Dense | Experts] = {
        name: Dense(rows, *shape, wgrad, plan.dtype, recipe)
        for name, shape in dense.items()
        if name not in found
    }
    if experts is not None and EXPERTS in wanted and EXPERTS not in found:
        products[EXPERTS] = experts()
    return found | speeds(products, plan.num_micro_batches, device, memory)


def plain_products(dense: Mapping[str, tuple[int, int]], found: Mapping[str, float]) -> InBf16:
    """Return the GEMMs that are slower in fp8 and stay in bf16."""
    left = slower(found)
    return InBf16(tuple(dense[name] for name in left if name in dense), EXPERTS in left)


def describe_products(plan: Plan, found: Mapping[str, float]) -> list[str]:
    precision, skipped = plan.precision, sorted(plan.fp8_skips)
    if precision.fp8 is Fp8Recipe.none:
        return []
    products = to_text(found) if found else f"fp8 in {', '.join(precision.fp8_products)}"
    vendor, timed = plan.fp8_vendor, precision.fp8_measure is Fp8Measure.auto
    if not found and timed and not (vendor and {*precision.fp8_products} == {EXPERTS}):
        products += "; what gains by it is timed on a GPU only"
    if vendor is not None:
        products += f"; experts by moe.experts={vendor}, not timed"
    if EXPERTS in slower(found) and plan.fp8_rows:
        products += "; so tokens are dispatched in bf16"
    layers = f"no fp8 in layer{'s' * (len(skipped) > 1)} {', '.join(map(str, skipped))}"
    words = f"{precision.fp8.value} {products}".replace("fp8 fp8", "fp8")
    return [words, *[layers] * bool(skipped)]
