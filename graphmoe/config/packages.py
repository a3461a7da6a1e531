"""Optional packages: import names, uses and installation; the doctor, env.json and errors read the table."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

from graphmoe.config.ranges import ConfigError


class Package(NamedTuple):
    """An optional package."""

    module: str
    """Name that is imported."""
    distribution: str
    enables: str
    """Values of keys that need it."""
    install: str
    """Command that installs it."""
    is_native: bool = False
    """Built against torch or a driver, so that it may be installed and still not load."""


VENDORS = {
    "te": Package(
        "transformer_engine",
        "transformer-engine",
        "model.attention_backend=te, moe.experts=te",
        "pip install --no-build-isolation 'transformer-engine[pytorch]'",
        is_native=True,
    ),
    "turbo": Package(
        "primus_turbo",
        "primus-turbo",
        "model.attention_backend=turbo, moe.experts=turbo, moe.dispatcher=turbo",
        "pip install --no-build-isolation 'primus-turbo[pytorch]' "
        "--extra-index-url https://amd-agi.github.io/Primus-Turbo/simple/",
        is_native=True,
    ),
    "deepep": Package(
        "deep_ep",
        "deep_ep",
        "moe.dispatcher=deepep",
        "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP@v1.2.1",
        is_native=True,
    ),
}
"""Packages behind backends and dispatchers, by the word that asks for them."""
TRITON = Package(
    "triton",
    "triton",
    "compile.enabled=true on a GPU, moe.experts=triton",
    "pip install triton",
    is_native=True,
)
SUBMITIT = Package(
    "submitit", "hydra-submitit-launcher", "hydra/launcher=slurm", "pip install 'graphmoe[slurm]'"
)
PLUGINS = {
    "launcher/joblib": Package(
        "joblib", "hydra-joblib-launcher", "hydra/launcher=joblib", "pip install 'graphmoe[sweeps]'"
    ),
    "sweeper/optuna": Package(
        "optuna", "hydra-optuna-sweeper", "hydra/sweeper=optuna", "pip install 'graphmoe[optuna]'"
    ),
    "launcher/submitit_slurm": SUBMITIT,
    "launcher/submitit_local": SUBMITIT,
}
"""Packages that bring an option of Hydra's groups."""
PACKAGES = (
    TRITON,
    *VENDORS.values(),
    Package("datasets", "datasets", "data=hf", "pip install 'graphmoe[hf]'"),
    Package("pyarrow", "pyarrow", "data=files with .parquet files", "pip install 'graphmoe[hf]'"),
    Package("wandb", "wandb", "log.wandb=true", "pip install 'graphmoe[wandb]'"),
    Package("transformers", "transformers", "tests against its models", "pip install 'graphmoe[dev]'"),
    Package("matplotlib", "matplotlib", "plots in the documentation", "pip install 'graphmoe[dev]'"),
    *dict.fromkeys(PLUGINS.values()),
)
"""All optional packages."""


def is_installed(package: str) -> bool:
    """Return True where a top-level package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def require_package(
    key: str, value: str, installed: Callable[[str], bool] = is_installed, instead: str | None = None
) -> None:
    """Raise ConfigError where ``key`` asks for a backend or dispatcher whose package is missing."""
    package = VENDORS.get(value)
    if package is not None and not installed(package.module):
        raise ConfigError(
            f"{key}={value} needs the package {package.module}, which is not installed; install it with: "
            f"{package.install}, or use {instead or f'{key}=auto'}"
        )
