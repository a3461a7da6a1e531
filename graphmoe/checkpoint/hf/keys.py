"""Validated reading of config.json's keys; conversion of those of the rotary embedding."""

import itertools
import json
import math
from typing import Any

from graphmoe.config.schema import ModelConfig, RopeScaling
from graphmoe.model.attention import yarn_magnitude

LARGEST = 1e300


class Keys:
    """Reader of a config.json's keys; an invalid key adds a line to ``problems``."""

    def __init__(self, raw: dict[str, Any], problems: list[str] | None = None) -> None:
        self.raw = raw
        self.problems = [] if problems is None else problems

    def int(self, *names: str, default: int | None = None, absent: int | None = None) -> int:
        """Return the integer of the first name present and not null; ``absent``: the default unless null."""
        name = next((name for name in names if self.raw.get(name) is not None), names[0])
        value = self.raw.get(name)
        instead = default if name in self.raw or absent is None else absent
        if value is None and instead is not None:
            return instead
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**31:
            self._expected(name, value, "a whole number of less than 2^31")
            return 1
        return value

    def float(self, name: str, default: float) -> float:
        """Return the number, or the default if absent or null."""
        value = self.raw.get(name, default)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
            self._expected(name, value, "a number")
            return default
        return float(value)

    def bool(self, name: str, default: bool) -> bool:
        """Return the boolean, or the default if absent or null."""
        value = self.raw.get(name)
        if not isinstance(value, bool | None):
            self._expected(name, value, "true or false")
        return value if isinstance(value, bool) else default

    def require(self, name: str, null: str) -> None:
        """Add a problem if the key is absent (transformers has a default); ``null`` says what null means."""
        if name not in self.raw:
            self.problems.append(f"{name} is missing; it must be a whole number, or null for {null}")

    def only(self, name: str, *supported: Any) -> None:
        """Add a problem for a value other than ``supported``; an absent key or null is allowed."""
        value = self.raw.get(name)
        if value is not None and value not in supported:
            self.refuse(name, value, " or ".join(json.dumps(choice) for choice in supported))

    def layers(self, name: str, wanted: list[Any], pattern: str) -> None:
        """Add a problem that names the first entry of a list of layers that is not as in ``wanted``."""
        given = self.raw.get(name)
        if isinstance(given, list) and len(given) != len(wanted):
            self.problems.append(f"{name} has {len(given)} entries; supported is {pattern}")
        elif isinstance(given, list):
            wrong = (i for i, entry in enumerate(given) if entry != wanted[i])
            for i in itertools.islice(wrong, 1):
                self.refuse(f"{name}[{i}]", given[i], f"{json.dumps(wanted[i])} there: {pattern}")
        elif given is not None:
            self.refuse(name, given, pattern)

    def refuse(self, name: str, value: Any, supported: str) -> None:
        """Add a problem that names the key's unsupported value and what is supported."""
        self.problems.append(f"{name}={json.dumps(value)[:80]}; supported is {supported}")

    def _expected(self, name: str, value: Any, kind: str) -> None:
        there = f"{name}={json.dumps(value)[:80]}" if name in self.raw else f"{name} is missing; it"
        self.problems.append(f"{there} must be {kind}")


def each_nth(keys: Keys, name: str, usual: Any, nth: Any, count: int, *, least: int = 0) -> int:
    """Return n of a list of ``count`` layers, each n-th of them ``nth``, n >= ``least``; 0: none is."""
    given = keys.raw[name]
    every = given.index(nth) + 1 if isinstance(given, list) and nth in given else 0
    if every < least:
        every = least if every else count
    pattern = f"{count} entries {json.dumps(usual)}, but each n-th {json.dumps(nth)}"
    wanted = [nth if every and (i + 1) % every == 0 else usual for i in range(count)]
    keys.layers(name, wanted, pattern + f" (n={every})" * (every > 0))
    return every


# Keys of yarn and llama3 scaling and their ModelConfig fields
_YARN = {
    "factor": "yarn_factor",
    "original_max_position_embeddings": "yarn_original_context",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}

_LLAMA3 = {
    "factor": "llama3_factor",
    "low_freq_factor": "llama3_low_freq_factor",
    "high_freq_factor": "llama3_high_freq_factor",
    "original_max_position_embeddings": "llama3_original_context",
}


def read_rope(
    keys: Keys, *, default_theta: float, context: int, scales_scores: bool, fraction: float | None = None
) -> dict[str, Any]:
    """Return ModelConfig fields of the rotary embedding.

    ``scales_scores``: the family scales attention scores by mscale_all_dim. ``fraction``: its default part of
    a head with rotary embedding; None: whole heads only.
    """
    # rope_parameters in transformers 5
    name = next((each for each in ("rope_scaling", "rope_parameters") if keys.raw.get(each)), "rope_scaling")
    rope = keys.raw.get(name) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        keys.refuse(name, rope, "one dictionary for all layers")
        return {}
    inner = Keys(rope)
    of_theta, of_part = (inner if k in rope else keys for k in ("rope_theta", "partial_rotary_factor"))
    fields: dict[str, Any] = {"rope_theta": of_theta.float("rope_theta", default_theta)}
    if fraction is None:
        of_part.only("partial_rotary_factor", 1.0)
    else:
        fields["rotary_fraction"] = of_part.float("partial_rotary_factor", fraction)
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling == "yarn":
        fields |= _read_yarn(inner, context, scales_scores)
    elif scaling == "llama3" and not scales_scores:
        fields |= _read_llama3(inner)
    elif scaling != "default":
        inner.refuse("rope_type", scaling, '"default" or "yarn"' + ' or "llama3"' * (not scales_scores))
    keys.problems += [f"{name}.{line}" for line in inner.problems]
    return fields


def write_rope(config: ModelConfig, *, scales_scores: bool) -> dict[str, Any]:
    """Return config.json's keys of the rotary embedding, as in published files."""
    if config.rope_scaling is RopeScaling.none:
        return {"rope_theta": config.rope_theta, "rope_scaling": None}
    if config.rope_scaling is RopeScaling.llama3:
        kept = {key: getattr(config, field) for key, field in _LLAMA3.items()}
        return {"rope_theta": config.rope_theta, "rope_scaling": {"rope_type": "llama3", **kept}}
    scaling: dict[str, Any] = {"type": "yarn", "rope_type": "yarn"}
    scaling |= {key: getattr(config, field) for key, field in _YARN.items()}
    if not config.yarn_truncate:
        scaling["truncate"] = False
    magnitudes = {"mscale": config.yarn_mscale, "mscale_all_dim": config.yarn_mscale_all_dim}
    if scales_scores or magnitudes != {"mscale": 1.0, "mscale_all_dim": 0.0}:
        scaling |= magnitudes
    return {"rope_theta": config.rope_theta, "rope_scaling": scaling}


def _read_yarn(rope: Keys, context: int, scales_scores: bool) -> dict[str, Any]:
    factor = rope.float("factor", 0.0)
    if factor < 1:
        rope.refuse("factor", rope.raw.get("factor"), "1 or greater")
        factor = 1.0
    mscale, all_dim = _read_magnitudes(rope, scales_scores)
    magnitude = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)
    if abs(rope.float("attention_factor", magnitude) - magnitude) > 1e-6 * magnitude:
        rope.refuse("attention_factor", rope.raw["attention_factor"], f"null or {magnitude} for this factor")
    return {
        "rope_scaling": RopeScaling.yarn,
        "yarn_mscale": mscale,
        "yarn_mscale_all_dim": all_dim,
        "yarn_factor": factor,
        "yarn_original_context": rope.int("original_max_position_embeddings", default=context),
        "yarn_beta_fast": rope.float("beta_fast", 32.0),
        "yarn_beta_slow": rope.float("beta_slow", 1.0),
        "yarn_truncate": rope.bool("truncate", True),
    }


def _read_llama3(rope: Keys) -> dict[str, Any]:
    *factors, context = _LLAMA3.items()  # transformers has no defaults
    found: dict[str, Any] = {ours: rope.float(theirs, math.nan) for theirs, ours in factors}
    for theirs, ours in factors:
        if math.isnan(found[ours]):
            rope.refuse(theirs, rope.raw.get(theirs), "a number")
    return {"rope_scaling": RopeScaling.llama3, **found, context[1]: rope.int(context[0])}


def _read_magnitudes(rope: Keys, scales_scores: bool) -> tuple[float, float]:
    mscale, all_dim = rope.float("mscale", 1.0), rope.float("mscale_all_dim", 0.0)
    # transformers uses mscale=1 unless both are given and not 0; DeepSeek's code uses each as given
    if scales_scores and rope.raw.get("mscale") and all_dim:
        return mscale, all_dim
    if mscale != 1.0 or all_dim:
        given = {name: rope.raw.get(name) for name in ("mscale", "mscale_all_dim")}
        both = ", or both given and not 0" if scales_scores else ""
        rope.refuse("mscale and mscale_all_dim", list(given.values()), f"[null or 1, null or 0]{both}")
    return 1.0, 0.0
