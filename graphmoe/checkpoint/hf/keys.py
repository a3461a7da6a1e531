"""Reads the keys of a config.json and collects what is wrong with them."""

from __future__ import annotations

import json
from typing import Any

LARGEST = 1e300


class Keys:
    """The keys of a config.json; a read that fails adds a line to ``problems`` and goes on."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw
        self.problems: list[str] = []

    def int(self, *names: str, default: int | None = None) -> int:
        """Whole number under the first of these names that is there and not null.

        Without a default the key is required.
        """
        name, value = self._first(names)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**31:
            self._expected(name, value, "a whole number of less than 2^31")
            return 1
        return value

    def float(self, name: str, default: float) -> float:
        """Number under this name, or the default where it is absent or null."""
        value = self.raw.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
            self._expected(name, value, "a number")
            return default
        return float(value)

    def bool(self, name: str, default: bool) -> bool:
        """Truth value under this name, or the default where it is absent or null."""
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._expected(name, value, "true or false")
            return default
        return value

    def require(self, name: str, null: str) -> None:
        """Refuse a whole number that is absent, for which transformers has a default; null means ``null``."""
        if name not in self.raw:
            self.problems.append(f"{name} is missing; it must be a whole number, or null for {null}")

    def only(self, name: str, *supported: Any) -> None:
        """Refuse a value other than these; an absent key or null is fine."""
        value = self.raw.get(name)
        if value is not None and value not in supported:
            self.refuse(name, value, " or ".join(json.dumps(choice) for choice in supported))

    def refuse(self, name: str, value: Any, supported: str) -> None:
        """Note a value that graphmoe has no counterpart for, and what it has one for."""
        self.problems.append(f"{name}={json.dumps(value)[:80]}; supported is {supported}")

    def _first(self, names: tuple[str, ...]) -> tuple[str, Any]:
        for name in names:
            if self.raw.get(name) is not None:
                return name, self.raw[name]
        return names[0], None

    def _expected(self, name: str, value: Any, kind: str) -> None:
        if name in self.raw:
            self.problems.append(f"{name}={json.dumps(value)[:80]} must be {kind}")
        else:
            self.problems.append(f"{name} is missing; it must be {kind}")
