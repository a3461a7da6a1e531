"""Starts a tool whose whole configuration is composed by Hydra, and words its errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from graphmoe import completion
from graphmoe.config import ConfigError, RunConfig
from graphmoe.config_errors import explain
from graphmoe.config_rules import check, resolve

Task = Callable[[RunConfig], Any]


def hydra_app(
    task: Task,
    *,
    prog: str,
    examples: Sequence[str],
    makes_folder: bool = False,
    known_errors: tuple[type[Exception], ...] = (),
) -> None:
    """Compose the configuration, check it and hand it to ``task``.

    A ConfigError is printed without a traceback and ends the process with status 2, one of
    ``known_errors`` likewise with status 1. ``makes_folder`` says whether the tool writes into Hydra's
    run folder; where it does not, none is made.
    """
    if completion.is_install(sys.argv):
        print(completion.BASH, end="")
        return
    completion.adapt_query()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise what goes wrong, so that it can be worded here
    ConfigStore.instance().store(name="schema", node=RunConfig)
    OmegaConf.register_new_resolver("graphmoe.prog", lambda: prog, replace=True)
    OmegaConf.register_new_resolver("graphmoe.examples", lambda: "\n".join(examples), replace=True)
    if not makes_folder and not {"-sc", "--shell-completion"} & set(sys.argv):
        sys.argv += ["hydra.run.dir=.", "hydra.sweep.dir=.", "hydra.sweep.subdir=."]
    errors: list[Exception] = []
    known: tuple[type[Exception], ...] = (ConfigError, *known_errors)

    @hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")
    def run(cfg: DictConfig) -> Any:
        try:
            return task(to_config(cfg))
        except known as error:
            errors.append(error)  # Hydra would print a second line about the job
            return None

    interrupted = False
    try:
        run()
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        errors.append(ConfigError(explain(error, sys.argv[1:])))
    except KeyboardInterrupt:  # outside the steps, which take the signal themselves, or to end a sweep
        interrupted = True
    for message in dict.fromkeys(str(error) for error in errors):
        print(f"error: {message}", file=sys.stderr)
    if errors:
        sys.exit(2 if any(isinstance(error, ConfigError) for error in errors) else 1)
    if interrupted:
        sys.exit(130)


def to_config(cfg: DictConfig) -> RunConfig:
    """The typed, checked and resolved configuration.

    The second merge is strict: it refuses keys that ``+key=value`` slipped past the schema.
    """
    try:
        plain = OmegaConf.to_container(cfg, resolve=True)
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), plain)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, sys.argv[1:])) from error
    config = OmegaConf.to_object(merged)
    assert isinstance(config, RunConfig)
    check(config)
    return resolve(config)


def to_plain(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain values, enums by name: what ``resolved.yaml`` holds."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}
