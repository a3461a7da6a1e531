"""Optional packages: import names, uses and installation."""

import importlib.metadata
import importlib.util
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

from graphmoe.config.ranges import ConfigError, spelled


class Package(NamedTuple):
    module: str
    distribution: str
    enables: str  # values of keys that need it
    install: str
    is_native: bool = False  # built against torch or drivers; may fail to load
    plugin: str | None = None  # distribution of its Hydra plug-in


_BUILT = "pip install --no-build-isolation"
_OWN = "pip install 'graphmoe[{}]'"
_TURBO = "'graphmoe[turbo]' --extra-index-url https://amd-agi.github.io/Primus-Turbo/simple/"
_TE_KEYS = "model.attention_backend=te, moe.experts=te"
_TURBO_KEYS = "model.attention_backend=turbo, moe.experts=turbo, moe.dispatcher=turbo"
_DEEPEP = f"{_BUILT} git+https://github.com/deepseek-ai/DeepEP@v1.2.1"
VENDORS = {
    "te": Package("transformer_engine", "transformer-engine", _TE_KEYS, f"{_BUILT} 'graphmoe[te]'", True),
    "turbo": Package("primus_turbo", "primus-turbo", _TURBO_KEYS, f"{_BUILT} {_TURBO}", True),
    "flash4": Package(
        "flash_attn.cute", "flash-attn-4", "model.attention_backend=flash4", _OWN.format("flash4"), True
    ),
    "fla": Package("fla", "fla-core", "model.delta_net_backend=fla", _OWN.format("fla"), True),
    "deepep": Package("deep_ep", "deep_ep", "moe.dispatcher=deepep", _DEEPEP, True),
}
TRITON = Package(
    "triton", "triton", "compile.enabled=true on a GPU, moe.experts=triton", "pip install triton", True
)


def _plugin(module: str, enables: str, extra: str, plugin: str) -> Package:
    return Package(module, module, enables, _OWN.format(extra), plugin=plugin)


_SUBMITIT = _plugin("submitit", "hydra/launcher=slurm", "slurm", "hydra-submitit-launcher")
PLUGINS = {
    "launcher/joblib": _plugin("joblib", "hydra/launcher=joblib", "sweeps", "hydra-joblib-launcher"),
    "sweeper/optuna": _plugin("optuna", "hydra/sweeper=optuna", "sweeps", "hydra-optuna-sweeper"),
    "launcher/submitit_slurm": _SUBMITIT,
    "launcher/submitit_local": _SUBMITIT,
}
_EXTRAS = {
    "datasets": ("data=hf", "hf"),
    "pyarrow": ("data=files with .parquet files", "hf"),
    "wandb": ("log.wandb=true", "wandb"),
    "mlflow": ("log.mlflow=true", "mlflow"),
    "transformers": ("tests against its models", "dev"),
    "matplotlib": ("plots in the documentation", "dev"),
}
FOR_PLOTS = _OWN.format("dev")
PACKAGES = (
    TRITON,
    *VENDORS.values(),
    *(Package(name, name, enables, _OWN.format(extra)) for name, (enables, extra) in _EXTRAS.items()),
    *dict.fromkeys(PLUGINS.values()),
)


def is_installed(package: str) -> bool:
    """Return whether a package is installed, without importing it, but for the one that holds it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is missing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def require_package(key: str, value: str, instead: str | None = None) -> None:
    """Raise ConfigError if the package of a backend or dispatcher is missing."""
    package = VENDORS.get(value)
    if package is not None and not is_installed(package.module):
        raise ConfigError(_missing(package, f"{key}={value}", instead or f"{key}=auto"))


def missing_packages(config: Any) -> Iterator[str]:
    """Yield a line per missing package that the configuration needs."""
    for package in PACKAGES:
        for word in package.enables.split(", "):
            key, _, value = word.partition("=")
            if not value.isalnum() or "/" in key:
                continue
            asked = spelled(operator.attrgetter("data.source" if key == "data" else key)(config))
            if value == asked and not is_installed(package.module):
                yield _missing(package, word, f"{key}=auto" if package.is_native else None)


def _missing(package: Package, asked: str, instead: str | None) -> str:
    return (
        f"{asked} needs the package {package.module}, which is not installed; install it with: "
        f"{package.install}{f', or use {instead}' if instead else ''}"
    )
