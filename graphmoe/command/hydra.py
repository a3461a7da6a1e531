"""Start of a tool that is configured by Hydra; its errors are printed as one message.

Nothing here imports torch before the configuration is composed: a misspelt key is answered at once.
"""

import argparse
import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from graphmoe.command.errors import explain, is_model_folder, options, parsed
from graphmoe.command.sweep import job
from graphmoe.command.sweep.process import SweepError
from graphmoe.command.words import OTHER_SOURCES, composed, help_text, own_folders, run_words
from graphmoe.config.arguments import answer_version, emit, print_error, wants_help
from graphmoe.config.choices import CODE_FOLDERS
from graphmoe.config.masking import MASK, hidden, note_interpolations
from graphmoe.config.progress import starting
from graphmoe.config.ranges import OWN_CODE, own_code
from graphmoe.config.schema import ConfigError, OutputFormat, RunConfig, cache_root, compiled_folder
from graphmoe.config.untrusted import load_yaml
from graphmoe.plan.rules.auto import value_of
from graphmoe.run.files import hydra_value
from graphmoe.runtime.cache.folders import check_trusted
from graphmoe.runtime.host.signals import Interrupted

log = logging.getLogger(__name__)

Task = Callable[[RunConfig], Any]
Prepare = Callable[[RunConfig], Any]
Complete = Callable[[RunConfig], RunConfig]
START = "checkpoint.init_from"
PROGRAMS = tuple(f"compile.{key}" for key in ("cache_dir", "cache_shared"))
PROGRAMS += "data.cache_dir", "log.wandb", "log.mlflow", "checkpoint.mirror"
"""Keys that choose folders of code, trackers or a mirror; variables of host.env may choose programs too."""
_SLASHES = re.compile(r"(?<=[^=,/'\"])/+(?=['\"]?(,|$))")  # ends of names of folders, as shells complete them


def hydra_app(
    task: Task,
    *,
    prog: str,
    examples: Sequence[str],
    makes_folder: bool = False,
    known_errors: tuple[type[Exception], ...] = (),
    prepare: Prepare | None = None,
    complete: Complete | None = None,
) -> None:
    """Compose the configuration, check it and hand it to ``task``.

    A ConfigError is printed without a traceback and ends the process with status 2, one of
    ``known_errors`` likewise with its ``status``, or 1. ``makes_folder`` says whether the tool writes into
    Hydra's run folder, which it creates after the checks. ``prepare`` is called between check and resolve,
    before GPUs are queried. ``complete`` sets values that the tool knows, before the check.
    """
    _read_words(prog, examples)
    # Read when torch is imported: OpenMP threads that spin at barriers make a CPU run up to ten times slower
    # beside another busy process.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise what goes wrong, so that it can be worded here
    ConfigStore.instance().store(name="schema", node=RunConfig)
    resolvers: dict[str, Callable[..., str]] = {
        "prog": lambda: prog,
        "sweep_report": lambda: f"{job.SweepReport.__module__}.{job.SweepReport.__qualname__}",
        "sweep_dir": lambda resume, new: os.path.expanduser(resume) if resume else new,
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(f"graphmoe.{name}", resolver, replace=True)
    if not makes_folder and not {"-sc", "--shell-completion"} & set(sys.argv):
        sys.argv += ["hydra.run.dir=.", "hydra.sweep.dir=.", "hydra.sweep.subdir=."]
    named = re.findall(OWN_CODE, " ".join(sys.argv[1:]))  # here, as a job of a cluster has another argv
    errors: list[Exception] = []
    composed: list[DictConfig] = []
    known: tuple[type[Exception], ...] = (ConfigError, *known_errors)

    @hydra.main(version_base="1.3", config_path="pkg://graphmoe.conf", config_name="config")
    def run(cfg: DictConfig) -> Any:
        composed.append(cfg)
        sources = HydraConfig.get().runtime.config_sources
        folders = [os.path.abspath(source.path) for source in sources if source.schema == "file"]
        os.environ[CODE_FOLDERS] = os.pathsep.join(folders)
        job.restore_run_folder()

        def composed_run() -> RunConfig:
            return to_config(cfg, prepare, complete, prog, named)

        try:
            if makes_folder and job.in_sweep():
                return job.run_job(lambda: task(composed_run()), known)
            job.check_single(cfg.sweep.resume)
            return task(composed_run())
        except known as error:
            errors.append(error)  # Hydra would print a second line about the job
            return None

    interrupted = _run(run, composed, errors)
    status = job.end_sweep()
    for message in dict.fromkeys(hidden(str(error), sys.argv[1:]) for error in errors):
        print_error(message)
    if errors:
        statuses = [2 if isinstance(error, ConfigError) else getattr(error, "status", 1) for error in errors]
        sys.exit(max(statuses))
    if interrupted or status:
        sys.exit(interrupted or status)


def _read_words(prog: str, examples: Sequence[str]) -> None:
    words = sys.argv[1:]
    with_all = bool({"--help=all", "--help-all"} & {*words})
    if with_all or wants_help(words):
        emit({}, help_text(prog, examples, words, with_all=with_all), OutputFormat.text)
        sys.exit(0)
    answer_version(words)
    try:
        sys.argv[1:] = read_words(words, prog)
    except ConfigError as error:
        print_error(hidden(str(error), words))
        sys.exit(2)


def read_words(argv: Sequence[str], prog: str = "") -> list[str]:
    """Return Hydra's command line; a folder in model= or checkpoint.init_from becomes a model option."""
    words = [_SLASHES.sub("", word) if word.startswith("model=") else word for word in run_words(argv)]
    for folder in filter(_has_weights, own_folders(words)):
        raise ConfigError(
            f"--config-dir {folder} has weights, so its YAML may be a stranger's; use model={folder}"
        )
    given = {override.key_or_group: override for override in parsed(words)[0]}
    key, chosen, start = "model", given.get("model"), given.get(START)
    is_free = "experiment" not in given and not {*OTHER_SOURCES} & {*words}  # which may choose a model
    if not chosen and start and is_free and all(map(is_model_folder, _names(start))):
        key, chosen = START, start
        if start.is_choice_sweep():  # the model of each job sets it
            words = [word for word in words if word != start.input_line]
        words.append(f"model={','.join(hydra_value(name.rstrip('/')) for name in _names(start))}")
    if chosen is None or chosen.is_delete():
        return words
    resumed = given.get("checkpoint.resume_from")
    is_resumed = resumed is not None and resumed.value() is not None
    is_random = start is not None and start.value() is None and not is_resumed
    code = [str(given[name].value()) for name in ("model.attention", "model.layer") if name in given]
    for name in {*_names(chosen)} - {*options("model", [*own_folders(words)])}:
        if is_model_folder(name):
            if prog:
                starting(prog)
            _store_model(key, name.rstrip("/"), code, is_resumed=is_resumed, is_random=is_random)
    return words


def _has_weights(folder: Path) -> bool:
    try:
        names = os.listdir(folder) if folder.is_dir() else []
    except OSError as error:
        raise ConfigError(f"--config-dir {folder} cannot be read ({error.strerror})") from error
    return any(name.endswith(("weights.json", ".safetensors", ".safetensors.index.json")) for name in names)


def _names(chosen: Override) -> list[str]:
    return [*map(str, chosen.sweep_string_iterator() if chosen.is_choice_sweep() else [chosen.value()])]


def _store_model(key: str, name: str, code: Sequence[str], *, is_resumed: bool, is_random: bool) -> None:
    from graphmoe.run.weights import model_of, option_name, tuned  # imports torch

    folder = Path(os.path.expanduser(name))
    try:
        config, has_weights, compute = model_of(folder, code)
        if key == START and not has_weights:
            raise ConfigError(f"the folder has no weights; model={name} takes its model alone")
    except ConfigError as error:
        raise ConfigError(f"{key}={name}: {error}") from error
    # The folder is untrusted: only keys of the model are read, and nothing in it is interpolated.
    is_tuned = compute is not None and not is_random
    config = replace(tuned(config) if is_tuned else config, name=option_name(config.name))
    node = {"model": OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)}
    if compute is not None and is_tuned:
        node["precision"] = {"compute": compute.name}
    if has_weights and not is_resumed:
        node["checkpoint"] = {"init_from": str(folder)}
    *group, option = filter(None, f"model/{name}".split("/"))
    ConfigStore.instance().store(option, node, "/".join(group), package="_global_")


def _run(run: Callable[[], Any], composed: Sequence[DictConfig], errors: list[Exception]) -> int:
    if sys.version_info >= (3, 14):  # it validates help texts, and one of Hydra 1.3 is a lazy object
        argparse.ArgumentParser._check_help = lambda self, action: None
    if nameless := next((word for word in sys.argv[1:] if word.startswith("=")), None):
        errors.append(ConfigError(f"'{nameless}' on the command line names no key; type key=value"))
        return 0
    try:
        run()
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        errors.append(ConfigError(_explained(error)))
    except KeyboardInterrupt as error:  # outside the steps, which take it themselves, or to end a sweep
        return error.status if isinstance(error, Interrupted) else 130
    except SweepError as error:
        errors.append(ConfigError(str(error)))
    except Exception as error:
        if not composed:  # a value that Hydra does not foresee
            errors.append(ConfigError(_explained(error)))
            return 0
        if not job.has_unfinished_jobs():
            raise
        errors.append(error)  # a sweeper that cannot go on without the jobs that failed
    return 0


def _explained(error: Exception) -> str:
    return hidden(explain(error, sys.argv[1:]), sys.argv[1:])


@contextmanager
def _hiding() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise type(error)(hidden(str(error), sys.argv[1:])) from error


@_hiding()
def to_config(
    cfg: DictConfig,
    prepare: Prepare | None = None,
    complete: Complete | None = None,
    prog: str = "",
    named: Collection[str] | None = None,
) -> RunConfig:
    """Return the composed configuration, typed, checked and resolved. *Raises* ConfigError.

    ``named``: code outside the package that may be imported, as package.module:NAME; None allows all.
    """
    try:
        note_interpolations(cfg)
        # A second, strict merge: it refuses keys that +key=value slipped past the schema.
        config = _typed(OmegaConf.to_container(cfg, resolve=True))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, sys.argv[1:])) from error
    if strange := _strange_code(config, named):
        words = " ".join(f"{key}={f'[{name}]' if key == 'passes.extra' else name}" for key, name in strange)
        raise ConfigError(f"a YAML file names code outside the package; if you trust it, type {words} too")
    _refuse_two_lengths(config, sys.argv[1:])
    given = {word.lstrip("+").partition("=")[0] for word in sys.argv[1:]}
    return _resolved(config if complete is None else complete(config), prepare, prog, given)


def compose_config(*words: str, complete: Complete | None = None) -> RunConfig:
    """Return the configuration of overrides, with automatic keys decided. *Raises* ConfigError.

    ``complete`` sets values that the caller knows, before the check.
    """
    from graphmoe.training.auto import decided  # imports torch

    try:
        return decided(to_config(composed(words), complete=complete))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"overrides: {explain(error, words)}") from error


def _refuse_two_lengths(config: RunConfig, words: Sequence[str]) -> None:
    steps = next((word for word in words if word.lstrip("+").startswith("train.steps=")), None)
    for key in ("tokens", "epochs"):
        if steps and (value := getattr(config.train, key)) is not None:
            raise ConfigError(f"{steps} and train.{key}={value} both set the run's length; leave one out")


@_hiding()
def load_config(path: Path, prepare: Prepare | None = None, named: Sequence[str] | None = ()) -> RunConfig:
    """Return the configuration in a ``resolved.yaml``, typed, checked and resolved. *Raises* ConfigError.

    ``named``: code outside the package that the file may import, as package.module:NAME, and keys that
    choose programs, folders of code or trackers, which else have their defaults; None allows all.
    """
    try:
        plain = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); give the resolved.yaml of a run, which "
            f"python -m graphmoe.train launch.write_only=true writes"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(plain, dict):
        raise ConfigError(f"{path} holds no keys of a configuration; give the resolved.yaml of a run")
    try:
        merged = OmegaConf.merge(schema(), plain)
        assert isinstance(merged, DictConfig)
        note_interpolations(merged)
        config = _typed(plain)
    except (OmegaConfBaseException, ArithmeticError) as error:
        in_file = HydraException(f"In '{path.with_suffix('')}':")  # as Hydra names the file of an error
        in_file.__cause__ = error
        raise ConfigError(explain(in_file, [])) from error
    if strange := _strange_code(config, named):
        shown = ", ".join(f"{key}={name}" for key, name in strange)
        raise ConfigError(
            f"{path} names code outside the package: {shown}; if you trust it, add after the file's path: "
            f"{' '.join(name for _, name in strange)}"
        )
    if named is not None:
        _forget_programs(config, named, path)
    return _resolved(config, prepare)


def _strange_code(config: RunConfig, named: Collection[str] | None) -> list[tuple[str, str]]:
    if named is None:
        return []
    # other names import nothing, and `check` says what is wrong with them
    return [(key, name) for key, name in own_code(config) if OWN_CODE.fullmatch(name) and name not in named]


def chosen_programs(config: RunConfig) -> list[str]:
    """Return keys that are set and in ``PROGRAMS``, and variables of host.env that are not masked."""
    defaults = {"compile.cache_dir": str(compiled_folder()), "data.cache_dir": str(cache_root())}
    found = [f"host.env.{name}" for name, value in config.host.env.items() if value != MASK]
    return found + [k for k in PROGRAMS if value_of(config, k) not in (None, False, defaults.get(k))]


def _forget_programs(config: RunConfig, named: Collection[str], path: Path) -> None:
    """Set `chosen_programs` to their defaults, but for ``named``."""
    forgotten = [key for key in chosen_programs(config) if key not in named]
    for key in forgotten:
        section, _, name = key.partition(".")
        if section == "host":
            del config.host.env[name.removeprefix("env.")]
        else:
            setattr(getattr(config, section), name, OmegaConf.select(schema(), key))
    if forgotten:
        log.warning(
            "%s sets keys that only its reader sets, as the file may be a stranger's; if you trust it, add "
            "after its path: %s",
            path,
            " ".join(forgotten),
        )


def _typed(plain: Any) -> RunConfig:
    config = OmegaConf.to_object(OmegaConf.merge(schema(), plain))
    assert isinstance(config, RunConfig)
    return config


@functools.cache
def schema() -> DictConfig:
    return OmegaConf.structured(RunConfig)


def _resolved(
    config: RunConfig, prepare: Prepare | None, prog: str = "", given: Collection[str] = ()
) -> RunConfig:
    if config.checkpoint.init_from or config.checkpoint.resume_from:
        from graphmoe.run.stored import with_start_tokenizer

        config = with_start_tokenizer(config)
    if config.compile.cache:
        check_trusted(compiled_folder(config.compile.cache_dir), shared=config.compile.cache_shared)
    from graphmoe.plan.rules import check

    check(config, given)
    if prepare is not None:
        prepare(config)
    if prog:
        starting(prog)
    from graphmoe.plan.rules import resolve  # imports torch

    return resolve(config)
