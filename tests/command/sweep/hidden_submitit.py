"""``python -m graphmoe.train`` as it is where Hydra's launcher for Slurm is not installed."""

import pkgutil
from collections.abc import Iterator
from typing import Any

from graphmoe import train


def main() -> None:
    walk = pkgutil.walk_packages

    def without_submitit(*arguments: Any, **named: Any) -> Iterator[pkgutil.ModuleInfo]:
        return (found for found in walk(*arguments, **named) if "submitit" not in found.name)

    pkgutil.walk_packages = without_submitit  # Hydra finds its plugins by it
    train.main()
