"""Runs of a model whose step takes milliseconds: in this process, or by the real command line."""

import copy
import functools
import gc
import importlib
import inspect
import io
import json
import math
import os
import pkgutil
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from rich.console import Console

from graphmoe.checkpoint.entries import flatten
from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.command.hydra import to_config
from graphmoe.config.arguments import run_tool
from graphmoe.config.schema import RunConfig
from graphmoe.model.transformer import Transformer
from graphmoe.plan.plan import plan_of
from graphmoe.run.metrics_file import BESIDE_STEPS
from graphmoe.runtime.host.logs import Progress
from graphmoe.training.auto import decided
from graphmoe.training.setup import build_trainer
from tests.forked import FORKS

ROOT = Path(__file__).parents[1]
PRESETS = sorted(path.stem for path in (ROOT / "conf" / "model").glob("*.yaml"))

TINY = (
    "run.device=cpu", "model.name=mini", "model.vocab_size=64", "model.hidden_size=16",
    "model.num_layers=2", "model.dense_ffn_size=16", "model.num_heads=2", "model.kv_lora_rank=8",
    "model.qk_nope_head_dim=4", "model.qk_rope_head_dim=4", "model.v_head_dim=4", "model.num_experts=4",
    "model.expert_ffn_size=8", "model.shared_ffn_size=8", "model.context_length=16",
    "model.selection_bias=true", "model.peak_lr=1e-2", "data.source=synthetic", "optim.lr=1e-2",
    "optim.warmup_steps=0", "train.steps=6", "train.global_batch_size=4", "train.micro_batch_size=2",
    "train.val_interval=3", "train.val_batches=2", "train.log_interval=2", "checkpoint.interval=3",
    "host.manual_gc=false", "compile.enabled=false", "log.tensorboard=false", "log.report=false",
)  # fmt: skip
COMPILED_MODEL = (
    "model.q_lora_rank=8", "model.aux_loss=sequence", "model.aux_loss_coef=0.1", "model.z_loss_coef=0.1",
)  # fmt: skip
"""The model of tests that compile: what one of them compiled the others find in torch's cache. More or
fewer micro-batches are asked for by the global batch, since the size of each is part of every graph."""
COMPILED = ("compile.enabled=true", *COMPILED_MODEL)
TIMED = {"tokens_per_s", "tflops", "mfu", "memory_gib", "step_s", "start_s", "epoch"}
TIMED |= {*BESIDE_STEPS, "slowest_rank", "slowest_own_s", "median_own_s", "slow_ranks"}
"""Keys of a metrics row that may differ between two runs of the same configuration."""

QUIET = ("train.steps=100", "train.log_interval=100", "train.val_batches=0", "checkpoint.interval=0")
"""Words of runs whose steps a test makes one by one."""


def slow_but(cases, *default, exhaustive=()):
    """Return cases by name, or names alone, as parameters of a test, all slow but those named otherwise."""
    if not isinstance(cases, Mapping):
        cases = {name: name for name in cases}
    assert cases.keys() >= {*default, *exhaustive}
    marks = dict.fromkeys(cases, pytest.mark.slow) | dict.fromkeys(default, ())
    marks |= dict.fromkeys(exhaustive, pytest.mark.exhaustive)
    return [pytest.param(case, id=name, marks=marks[name]) for name, case in cases.items()]


def config(*overrides):
    return copy.deepcopy(_composed(overrides))


@functools.cache
def _composed(overrides):
    return decided(undecided_config(*overrides))


def undecided_config(*overrides):
    """The configuration with its automatic keys."""
    return to_config(OmegaConf.from_dotlist([*TINY, *overrides]))


@functools.cache
def _store_schema():
    ConfigStore.instance().store(name="schema", node=RunConfig)


def hydra_config(*words, with_hydra=True):
    _store_schema()
    with initialize_config_module("graphmoe.conf", version_base="1.3"):
        return compose("config", list(words), return_hydra_config=with_hydra)


def text_of(shown, width=200):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def document_of(main, capsys, *words):
    main([*words, "format=json"])
    return json.loads(capsys.readouterr().out)


def refusal(main, capsys, *words):
    """The error with which a tool ends, with status 2 and nothing on stdout."""
    with pytest.raises(SystemExit) as end:
        run_tool(main, [*words])
    shown = capsys.readouterr()
    assert end.value.code == 2 and shown.out == "" and "Traceback" not in shown.err
    return shown.err


def trainer_in(folder, *overrides):
    folder.mkdir(parents=True, exist_ok=True)
    run_config = config(*overrides)
    silent = Console(file=io.StringIO())
    progress = Progress(silent, run_config.train.steps, wanted=False)
    return build_trainer(plan_of(run_config, 1), folder, progress)


def train_in(folder, *overrides):
    trainer = trainer_in(folder, *overrides)
    assert trainer.run()
    return trainer


def metrics(folder):
    """The rows of metrics.jsonl, which must be JSON in the strict sense."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    strict = json.JSONDecoder(parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    return [*map(strict.decode, lines)]


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def numbers(folder):
    return [{k: v for k, v in row.items() if k not in TIMED} for row in metrics(folder)]


def assert_load_swings(rows, num_experts, after):
    """After a step, one expert had nearly all rows of a layer in one step, and less than half in another."""
    loads = [max(row["load_max_over_mean"]) for row in rows if "loss" in row and row["step"] > after]
    assert max(loads) > 0.95 * num_experts and min(loads) < 0.5 * num_experts, loads


def final_state(folder, scratch, *overrides):
    state = trainer_in(scratch, *overrides)._state()
    assert CheckpointStore.open_any(folder).load(state) is not None
    entries = flatten(state)
    return {**entries.tensors, **entries.values}


def decoded(node):
    """The entries of a state, moments in fewer bytes by their values in fp32."""
    if isinstance(node, dict):
        return {key: decoded(value) for key, value in node.items()}
    if not getattr(node, "encoded", None):
        return node
    values = torch.empty(node.data.shape)
    node.encoded.decode(values)
    return values.view(node.shape)


def assert_same_state(one, other, name=""):
    """Bitwise equality of results of ``final_state``, or of anything in them.

    Every NaN is the same, whose sign depends on the path that made it.
    """
    one, other = decoded(one), decoded(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same_state(value, other[key], key)
    elif isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{name}: {m}")
    else:
        assert repr(one) == repr(other), name


def assert_parts_are_the_whole(folder, *words):
    """Train 6 steps at once in ``whole``, and 3 and then 6 in ``parts``, bitwise alike."""
    train_in(folder / "whole", *words)
    for steps in (3, 6):
        train_in(folder / "parts", *words, f"train.steps={steps}")
    assert_same_ends(folder, "parts", words)
    train = [[row for row in numbers(folder / name) if "loss" in row] for name in ("whole", "parts")]
    assert train[0] == train[1] and len(train[0]) == 6


def assert_half_becomes_the_whole(folder, *words):
    """Train on from the checkpoints before step 6 of the run in ``whole``, bitwise alike."""
    shutil.copytree(folder / "whole", folder / "half")
    shutil.rmtree(folder / "half" / "checkpoints" / "step_00000006")
    train_in(folder / "half", *words)
    assert numbers(folder / "half") == numbers(folder / "whole")
    assert_same_ends(folder, "half", words)


def assert_same_ends(folder, other, words):
    states = [final_state(folder / name, folder / f"{name}_2", *words) for name in ("whole", other)]
    assert_same_state(*states)


def assert_same_runs(folder, words, of_plain=(), of_other=()):
    """Train in the folders plain and other: every row and the last state are the same bits."""
    states = []
    for name, more in (("plain", of_plain), ("other", of_other)):
        train_in(folder / name, *words, *more)
        states.append(final_state(folder / name, folder / f"{name}_scratch", *words))
    assert numbers(folder / "other") == numbers(folder / "plain")
    assert_same_state(*states)


def spoil_steps(monkeypatch, trainer, steps, *, only_gradients=False):
    """Make loss and gradients, or gradients alone, NaN at some steps: by a number that a graph reads too."""
    scale, whole, step = torch.ones(()), Transformer.loss, trainer._train_step

    def loss(self, *arguments):
        output = whole(self, *arguments)
        if not torch.is_grad_enabled():
            return output
        if only_gradients:
            output.total.register_hook(lambda gradient: gradient * scale)
            return output
        return output._replace(total=output.total * scale, cross_entropy=output.cross_entropy * scale)

    def train_step():
        scale.fill_(math.nan if trainer.step + 1 in steps else 1.0)
        step()

    monkeypatch.setattr(Transformer, "loss", loss)
    monkeypatch.setattr(trainer, "_train_step", train_step)


STEP = "graphmoe.training.trainer:Trainer._train_step"
SAVE = "graphmoe.checkpoint.store:write_entries"


class Command:
    """A started ``python -m <module> <words>`` in a folder, with its output in files there.

    ``slow``: functions (STEP, SAVE) that sleep that many seconds before each call, so that a signal arrives
    in time on a busy machine too; for workers of a launcher, ``environment`` says it (``tests.faults``).
    """

    def __init__(self, folder, words, module="graphmoe.train", slow=None, environment=None):
        self.out, self.err = folder / "stdout.txt", folder / "stderr.txt"
        arguments = (folder, words, module, self.out, self.err, slow or {}, environment or {})
        self.process = FORKS.Process(target=_child, args=arguments, daemon=True)
        self.process.start()
        self.pid = self.process.pid

    def wait(self, seconds=60):
        """The exit status; minus the signal that killed it."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"still running: {self.err.read_text()}"
        return self.process.exitcode

    def kill(self, number):
        if self.process.is_alive():
            os.kill(self.pid, number)

    def wait_until(self, reached, seconds=60):
        end = time.monotonic() + seconds
        while not reached() and self.process.is_alive():
            assert time.monotonic() < end, self.err.read_text()
            time.sleep(0.001)

    def wait_for_rows(self, folder, count):
        path = folder / "metrics.jsonl"
        self.wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= count)


def command(folder, *words, module="graphmoe.train", seconds=60, environment=None):
    started = Command(folder, words, module, environment=environment)
    started.wait(seconds)
    return started


def _sleep_first(name, seconds):
    function = pkgutil.resolve_name(name)

    @functools.wraps(function)
    def slow(*arguments, **named):
        time.sleep(seconds)
        return function(*arguments, **named)

    mock.patch(name.replace(":", "."), slow).start()


def _child(folder, words, module, out, err, slow, environment):
    os.chdir(folder)
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ.update({"PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment})  # for workers
    for name, seconds in slow.items():
        _sleep_first(name, seconds)
    sys.argv = [str(ROOT / f"{module.replace('.', '/')}.py"), *words]
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, stream.fileno())
    torch.set_num_threads(1)
    gc.freeze()  # or every collection looks through the modules too
    try:
        main = importlib.import_module(module).main
        run_tool(main) if inspect.signature(main).parameters else main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
