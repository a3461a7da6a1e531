"""Optional packages: import names, uses and installation."""

import contextlib
import functools
import importlib.metadata
import importlib.util
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from graphmoe.config.ranges import ConfigError, spelled


class Package(NamedTuple):
    module: str
    distribution: str
    enables: str  # values of keys that need it
    install: str
    is_native: bool = False  # built against torch or drivers; may fail to load
    plugin: str | None = None  # distribution of its Hydra plug-in
    # an AMD architecture, and the first version whose results are right on it
    right_from: tuple[str, str] | None = None


_BUILT = "pip install --no-build-isolation"
_OWN = "pip install 'graphmoe[{}]'"
_TURBO = "'graphmoe[turbo]' --extra-index-url https://amd-agi.github.io/Primus-Turbo/simple/"
_TE_KEYS = "model.attention_backend=te, moe.experts=te"
_TURBO_KEYS = "model.attention_backend=turbo, moe.experts=turbo, moe.dispatcher=turbo"
_DEEPEP = f"{_BUILT} git+https://github.com/deepseek-ai/DeepEP@v1.2.1"
VENDORS = {
    "te": Package("transformer_engine", "transformer-engine", _TE_KEYS, f"{_BUILT} 'graphmoe[te]'", True),
    # three races of its dense GEMMs, which raise no error (Primus-Turbo #570)
    "turbo": Package(
        "primus_turbo", "primus-turbo", _TURBO_KEYS, f"{_BUILT} {_TURBO}", True, right_from=("gfx950", "0.7")
    ),
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


@functools.cache
def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is missing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def amd_gpus(nodes: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> frozenset[str]:
    """Return the architectures of this machine's AMD GPUs, such as gfx950; from the driver, without torch."""
    found = set()
    for node in nodes.glob("*/properties"):
        with contextlib.suppress(OSError):  # a container may be denied some GPUs
            version = int((re.findall(r"^gfx_target_version (\d+)$", node.read_text(), re.M) or ["0"])[0])
            found.add(f"gfx{version // 10_000}{version // 100 % 100:x}{version % 100:x}")
    return frozenset(found - {"gfx000"})  # a CPU


def require_package(key: str, value: str, instead: str | None = None) -> None:
    """Raise ConfigError if the package of a backend or dispatcher is missing, or wrong on this GPU."""
    package = VENDORS.get(value)
    reason = package and reason_against(package, f"{key}={value}", instead or f"{key}=auto")
    if reason:
        raise ConfigError(reason)


def missing_packages(config: Any) -> Iterator[str]:
    """Yield a line per package that the configuration needs and that is missing, or wrong on this GPU."""
    for package in PACKAGES:
        for word in package.enables.split(", "):
            key, _, value = word.partition("=")
            if not value.isalnum() or "/" in key:
                continue
            asked = spelled(operator.attrgetter("data.source" if key == "data" else key)(config))
            instead = f"{key}=auto" if package.is_native else None
            if value == asked and (reason := reason_against(package, word, instead)):
                yield reason


def reason_against(package: Package, asked: str, instead: str | None = None) -> str | None:
    """Return why a package cannot serve what is ``asked``, and what to do; None if it can."""
    from packaging.version import Version

    last = f"{package.install}{f', or use {instead}' if instead else ''}"
    if not is_installed(package.module):
        return f"{asked} needs the package {package.module}, which is not installed; install it with: {last}"
    gpu, first = package.right_from or ("", "")
    if gpu not in amd_gpus() or Version(found := version_of(package.distribution) or "0") >= Version(first):
        return None
    return (
        f"{asked} needs {package.distribution} {first} or newer on {gpu}: {found} is installed, whose races "
        f"give wrong results without an error; install it with: {last.replace('install', 'install -U', 1)}"
    )
