"""Every change of torch's compiler settings, with the reason beside it."""

from __future__ import annotations

from typing import Any


def inductor_options() -> dict[str, Any]:
    """Options of Inductor for each graph that is compiled."""
    return {}
