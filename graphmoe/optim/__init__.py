"""Optimizers and the reduction of gradients over ranks."""

from graphmoe.config.choices import look_up
from graphmoe.optim.muon import MUON
from graphmoe.optim.rule import ADAMW, UpdateRule

RULES = {"adamw": ADAMW, "muon": MUON}


def rule_of(name: str) -> UpdateRule:
    """Return the update rule of a name or import path. *Raises* ConfigError."""
    return look_up(RULES, name, "optim.name", UpdateRule)
