"""Folders with one damaged file: no command gives a traceback, hangs, or says nothing."""

import json
import logging
import shutil

import pytest
import yaml

from graphmoe import cache, convert, generate
from graphmoe.config.masking import to_plain
from graphmoe.config.schema import ConfigError
from graphmoe.pipeline_view import __main__ as pipeline_view
from graphmoe.plan.plan import plan_of
from graphmoe.report import __main__ as report
from graphmoe.runtime.launch.failures import RunFailed
from graphmoe.runtime.pipeline.recorder import write_timelines
from graphmoe.runtime.ranks import Ranks
from graphmoe.trace import __main__ as trace
from graphmoe.training import run as training
from tests.command.test_cache_tool import keep
from tests.damage import failures, fresh_copy
from tests.kineto import FACTS, two_steps
from tests.pipeline_timelines import two_ranks
from tests.runs import config
from tests.runtime.cache.cache_contents import empty_cache

pytestmark = pytest.mark.slow

CASES = 40
"""Damages of each command's folder."""
KNOWN = (ConfigError, RunFailed, FileNotFoundError, PermissionError)
"""Errors that end a command with one line."""
COMPILED = {
    "graphs": 3, "seconds": 1.5, "recompiled": 0, "cache": {"fx_hits": 1, "aot_hits": 0},
    "passes": {"fuse_loss": {"matches": 1, "nodes_before": 9, "nodes_after": 5, "ms": 0.4,
                             "saved_bytes_before": 10, "saved_bytes_after": 5}},
    "units": [{"unit": "attn", "used": 2, "graphs": 3, "seconds": 1.5,
               "source": "compiled", "why_compiled": "new"}],
}  # fmt: skip
CAPTURED = {
    "on": "device", "scope": "layer", "graphs": 2, "seconds": 0.5, "pool_bytes": 100, "warmup_steps": 3,
    "spans": [{"unit": "attn", "places": 2, "graphs": 2, "nodes": 10, "seconds": 0.5}],
    "not_captured": {"moe": "waits for the host"},
}  # fmt: skip
PLACE = {"total": 1.0, "params": 0.5, "grads": 0.25, "activations": 0.25, "communication": 0.1}


@pytest.fixture(scope="module")
def run(tmp_path_factory, text_words):
    """The folder of a run with one checkpoint and a file of each kind that a run can leave."""
    folder = tmp_path_factory.mktemp("damaged") / "run"
    folder.mkdir()
    asked = config(*WORDS, *text_words)
    (folder / "resolved.yaml").write_text(yaml.safe_dump(to_plain(asked)))
    training.run_worker(plan_of(asked, 1), folder, Ranks())
    two_steps().write(folder / "profile" / "rank0.trace.json.gz", FACTS)
    write_timelines(folder / "pipeline.json", {4: two_ranks()})
    documents = {"compile_report": COMPILED, "capture_report": CAPTURED, "projection": {"places": [PLACE]}}
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


WORDS = (
    "model.selection_bias=false", "train.steps=2", "train.val_batches=1", "log.sample_tokens=0",
    "checkpoint.interval=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def weights(run):
    made = {kind: run.parent / kind for kind in ("hf", "graphmoe", "fp8")}
    for kind, folder in made.items():
        form = ["target=hf", "quantise=fp8_block"] if kind == "fp8" else [f"target={kind}"]
        convert.main([f"from={run}", f"to={folder}", *form, "max_shard_size=20KB"])
    return made


def failure(call, capsys, caplog):
    """Return what is wrong with how a command took a damaged folder, or None."""
    caplog.clear()
    try:
        call()
    except KNOWN as error:
        return None if str(error).strip() else f"an empty {type(error).__name__}"
    except SystemExit as error:
        shown = capsys.readouterr()
        return None if shown.out + shown.err else f"exit status {error.code} without a word"
    shown = capsys.readouterr()
    said = shown.out + shown.err + "".join(record.getMessage() for record in caplog.records)
    return None if said.strip() else "nothing is said"


@pytest.fixture
def require_none(tmp_path, capsys, caplog):
    """Call a command with damaged copies of a folder, and fail where it took one of them wrongly."""

    def require_none(name, source, call):
        caplog.set_level(logging.INFO)

        def outcome(folder, number):
            return failure(lambda: call(folder, number), capsys, caplog)

        assert failures(name, source, tmp_path / "x", outcome, CASES) == []

    return require_none


def test_pages_of_damaged_runs_are_made_or_refused(run, tmp_path, require_none):
    def call(folder, _):
        report.main([f"run={folder}", f"out={tmp_path}/a.html"])
        report.main([f"runs={folder},{run}", f"out={tmp_path}/b.html"])

    require_none("report", run, call)


def test_traces_of_damaged_runs_are_read_or_refused(run, require_none):
    def call(folder, _):
        trace.main([f"trace={folder}/rank0.trace.json.gz", "tracelens=false"])

    require_none("trace", run / "profile", call)


def test_pictures_of_damaged_recordings_are_drawn_or_refused(run, tmp_path, require_none):
    (source := tmp_path / "source").mkdir()
    shutil.copy(run / "pipeline.json", source)
    html = f"out={tmp_path}/pictures"
    require_none("pipeline_view", source, lambda folder, _: pipeline_view.main([f"run={folder}", html]))


@pytest.mark.parametrize("part", ["run", "checkpoints"])
def test_text_from_damaged_runs_is_generated_or_refused(run, tmp_path, require_none, part):
    def call(folder, number):
        generate.main([f"run={with_rest(run, folder, part)}", "prompt=the loss", "tokens=1"])

    require_none(f"generate {part}", run if part == "run" else run / part, call)


def with_rest(run, folder, part):
    if part == "run":
        return folder
    whole = fresh_copy(run, folder.parent / "whole")
    shutil.rmtree(whole / part)
    folder.rename(whole / part)
    return whole


@pytest.mark.parametrize("kind", ["run", "hf", "graphmoe", "fp8"])
def test_weights_of_damaged_folders_are_converted_or_refused(run, weights, tmp_path, require_none, kind):
    source = run if kind == "run" else weights[kind]

    def call(folder, number):
        target = "graphmoe" if kind in ("hf", "fp8") else "hf"
        convert.main([f"from={folder}", f"to={tmp_path}/to", f"target={target}", "overwrite=true"])

    require_none(f"convert {kind}", source, call)


@pytest.mark.parametrize("key", ["resume_from", "init_from", "resume"])
def test_runs_start_from_damaged_checkpoints_or_refuse_them(run, text_words, tmp_path, require_none, key):
    def call(folder, number):
        own = tmp_path / f"own-{number}"
        place = with_rest(run, folder, "checkpoints")
        words = () if key == "resume" else (f"checkpoint.{key}={place}",)
        plan = plan_of(config(*WORDS, *text_words, *words), 1)
        training.run_worker(plan, place if key == "resume" else own, Ranks())

    require_none(key, run / "checkpoints", call)


def test_damaged_compile_caches_are_listed_verified_and_pruned(tmp_path, monkeypatch, require_none):
    store = empty_cache(tmp_path, monkeypatch)
    for number, content in enumerate("ab", start=1):
        keep(store, number, "both", content * 30)

    def call(folder, number):
        action = ("list", "verify", "prune")[number % 3]
        cache.main([f"action={action}", f"cache_dir={folder}"])

    require_none("cache", store.folder, call)
