"""Passes, which rewrite the graph of a compile unit, one file each, and their table in execution order."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from graphmoe.config.choices import import_code
from graphmoe.config.schema import ConfigError, PassesConfig
from graphmoe.passes.base import PassSpec
from graphmoe.passes.fp8 import fp8_experts, fp8_linear, fp8_quantise
from graphmoe.passes.fuse_activation import fuse_activation
from graphmoe.passes.fuse_experts import fuse_experts
from graphmoe.passes.fuse_loss import fuse_loss
from graphmoe.passes.fuse_permutation import fuse_permutation
from graphmoe.passes.fuse_router import fuse_router
from graphmoe.passes.split_backward import split_backward

EXPERTS, ROUTER = ("moe_experts",), ("moe_router",)
JOINED = ("fuse_permutation", "fuse_activation")

PASSES = (
    # name, function, stage, numerics, segments that have its pattern
    PassSpec("fuse_permutation", fuse_permutation, "forward", "allclose", EXPERTS),
    PassSpec("fuse_activation", fuse_activation, "forward", "allclose", EXPERTS),
    PassSpec("fuse_router", fuse_router, "forward", "allclose", ROUTER),
    PassSpec("fuse_loss", fuse_loss, "forward", "allclose", ("loss",)),
    PassSpec("fuse_experts", fuse_experts, "forward", "allclose", EXPERTS, needs=JOINED),
    PassSpec("fp8_linear", fp8_linear, "forward", "allclose", optional=True),
    PassSpec("fp8_experts", fp8_experts, "forward", "allclose", needs=("fuse_experts",), optional=True),
    PassSpec("fp8_quantise", fp8_quantise, "joint", "bitwise", optional=True),
    PassSpec("split_backward", split_backward, "backward", "bitwise"),
)
"""Passes in execution order; fuse_experts fuses results of fuse_permutation and fuse_activation."""


def select_passes(config: PassesConfig, knobs: Mapping[str, Mapping[str, Any]]) -> list[PassSpec]:
    """Return the configured passes, in order; ``knobs`` are their keyword arguments, by name of pass.

    Raises ConfigError for unknown names, missing passes that others need, and extra entries without a pass.
    """
    names = [spec.name for spec in PASSES]
    for key, given in (("passes.enabled", config.enabled or []), ("passes.disabled", config.disabled)):
        unknown = [str(name) for name in given if name not in names]
        if unknown:
            raise ConfigError(
                f"{key}={given}: there is no pass {', '.join(unknown)}; there are {', '.join(names)}"
            )
    wanted = names if config.enabled is None else config.enabled
    chosen = [spec for spec in PASSES if spec.name in wanted and spec.name not in config.disabled]
    chosen = [spec for spec in chosen if spec.name in knobs or not spec.optional]
    for spec in chosen:
        lacking = [name for name in spec.needs if name not in [other.name for other in chosen]]
        if lacking:
            raise ConfigError(
                f"the pass {spec.name} fuses the results of {' and '.join(lacking)}; run those too, or "
                f"leave {spec.name} out as well: passes.disabled=[{','.join([*lacking, spec.name])}]"
            )
    return [replace(spec, knobs={**spec.knobs, **knobs.get(spec.name, {})}) for spec in chosen] + [
        _extra(path) for path in config.extra
    ]


def _extra(path: str) -> PassSpec:
    found, name = import_code(path, "passes.extra"), path.partition(":")[2]
    spec = found if isinstance(found, PassSpec) else PassSpec(name, found, "forward", "allclose")
    if spec.stage not in ("forward", "joint"):
        raise ConfigError(f"passes.extra={path} has the stage {spec.stage!r}; use 'forward' or 'joint'")
    try:
        spec.fingerprint()
    except TypeError as error:
        raise ConfigError(
            f"passes.extra={path}: {error}; write def f(graph) in a module and name it, or a "
            f"graphmoe.passes.base.PassSpec of it, whose knobs are numbers, strings, and lists and dicts of "
            f"them"
        ) from error
    return spec
