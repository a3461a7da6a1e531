"""Placeholders in files and messages of a run for values of host.env and of the environment."""

import io
import json
import logging
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from graphmoe import train
from graphmoe.command.hydra import load_config, schema, to_config
from graphmoe.config import masking
from graphmoe.config.masking import masked, masked_line, masked_overrides, to_plain
from graphmoe.config.schema import AuxLoss
from graphmoe.run.folder import claim
from graphmoe.run.machine import describe
from graphmoe.runtime.host import logs
from graphmoe.runtime.launch import stamps
from graphmoe.runtime.launch.failures import write_failure
from tests.runs import TINY, command

BASE = {"run": {"device": "cpu"}, "data": {"source": "synthetic"}}


@pytest.fixture
def composed(monkeypatch):
    def compose(keys: dict, **variables: str):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        cfg = OmegaConf.merge(schema(), BASE)
        for key, value in keys.items():
            OmegaConf.update(cfg, key, value, force_add=True)
        return to_plain(to_config(cfg))

    yield compose
    to_config(OmegaConf.merge(schema(), BASE))


KEYS = {"host.env": {"TOKEN": "hunter2", "OTHER": "x${oc.env:SECRET}"}, "train.seed": "${oc.env:SEED}"}
KEYS |= {"data.source": "memmap", "data.paths": ["a", "b"], "model.aux_loss": "none"}


def test_a_run_folder_has_names_and_interpolations_but_no_value(tmp_path, composed):
    plain = composed({**KEYS, "run.name": "${oc.env:SECRET}"}, SEED="5", SECRET="sesame")
    assert plain["host"]["env"] == {"TOKEN": "***", "OTHER": "***"}
    assert (plain["run"]["name"], plain["train"]["seed"]) == ("${oc.env:SECRET}", "${oc.env:SEED}")
    claim(tmp_path / "run", plain, resume=True).release()
    text = (tmp_path / "run" / "resolved.yaml").read_text()
    assert "hunter2" not in text and "sesame" not in text and yaml.safe_load(text) == plain
    read = load_config(tmp_path / "run" / "resolved.yaml")
    assert (read.run.name, read.train.seed, read.model.aux_loss) == ("sesame", 5, AuxLoss.none)
    assert to_plain(read) == plain


def test_a_run_is_continued_with_the_same_value_of_the_environment_and_no_other(tmp_path, composed):
    def folder_of(keys: dict, **variables: str) -> str:
        folder = claim(tmp_path / "run", composed(keys, **variables), resume=True)
        folder.release()
        return folder.path.name

    assert folder_of({"train.seed": "${oc.env:SEED}"}, SEED="5") == "run"
    assert folder_of({"train.seed": "${oc.env:SEED}"}, SEED="6") == "run-2"
    assert folder_of({"train.seed": 5}) == "run"
    assert folder_of({"train.seed": "${oc.env:OTHER}"}, OTHER="6") == "run-2"
    assert folder_of({"train.seed": "${oc.env:OTHER}"}, OTHER="5") == "run"
    assert folder_of({"train.seed": 7}) == "run-3"


def test_words_of_a_command_lose_the_values_of_host_env(monkeypatch):
    words = ["+host.env.TOKEN=hunter2", "host.env={A:b\nc}", "++host.env.X=a,b", "optim.lr=1"]
    words += ["++host={env:{A:b}}", "host={ threads: 1, env: {A: b}}"]
    masked = "+host.env.TOKEN=*** host.env=*** ++host.env.X=*** optim.lr=1 ++host=*** host=***"
    words += ["--host.env.A=b", "--host.env.TOKEN", "hunter2", "--train.steps", "3"]
    masked += " --host.env.A=*** --host.env.TOKEN *** --train.steps 3"
    assert masked_overrides(words) == masked.split()
    monkeypatch.setattr(sys, "orig_argv", ["python", *words])
    assert describe(torch.device("cpu"))["command"] == ["python", *masked.split()]
    others = ["host=amd", "host.threads=4", "host={threads:4}", "data.paths=[host.env.A=b]"]
    assert masked_overrides(others) == others


def test_a_line_of_words_loses_the_values_of_host_env():
    for words in (
        "+host.env.T='a model.secret=3'",
        "+host.env.T=secret=3 and more",
        '++host={env:{T:secret=3,U:"secret=3"}}',
        "host.env={T:secret=3}",
        "+host.env.T='a\nsecret=3'",
        "+host.env.T=a\nsecret=3",
    ):
        line = masked_line(f"#0 : optim.lr=1 {words} train.steps=2")
        assert "secret" not in line and "secret" not in masked_line(words)
        assert line.startswith("#0 : optim.lr=1 ") and line.endswith(" train.steps=2")


SECRETS = [
    "+host.env.A=[sesame]",
    "+host.env.A={B:sesame}",
    "host.env={A:[sesame]}",
    "train.steps=${oc.env:TOKEN}",
    "optim.schedule=${oc.env:TOKEN}",
    "run.name=a${oc.env:TOKEN}:/b",
    "recompute.segments=[${oc.env:TOKEN}]",
    "host.env.A=sesame{x",
]


@pytest.mark.parametrize("word", SECRETS)
def test_an_error_about_a_secret_of_the_wrong_type_does_not_print_it(word, monkeypatch, capsys):
    monkeypatch.setenv("TOKEN", "sesame")
    monkeypatch.setattr(sys, "argv", ["train", "data=synthetic", word])
    with pytest.raises(SystemExit) as end:
        train.main()
    said = capsys.readouterr().err
    assert end.value.code == 2 and "error: " in said and "sesame" not in said
    assert word.partition("=")[0].lstrip("+").removesuffix(".A") in said


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_no_file_of_a_run_or_a_sweep_has_a_secret(tmp_path, workers):
    sweep = ["optim.lr=1e-3", "hydra.sweep.dir=run", "-m"] if workers == 1 else ["hydra.run.dir=run"]
    words = ["+host.env.TOKEN=hunter2", "log.wandb=false", "+host.env.WORD='${oc.env:SECRET}'"]
    words += ["train.steps=2", f"launch.nproc={workers}", *sweep]
    run = command(tmp_path, *TINY, *words, seconds=120, environment={"SECRET": "sesame"})
    assert run.wait() == 0, run.err.read_text()
    for path in tmp_path.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert b"hunter2" not in content and b"sesame" not in content, path


VALUES = {
    "API_KEY": ("short1", True),
    "PASSWORD": ("987654", True),
    "LOGIN": ("open sesame/1", True),
    "OTHER": ("sesame7", False),
    "LIMIT": ("-1234567.5e10", False),
    "FOLDER": (sys.prefix, False),
    "NUM_TOKENS": ("100000", False),
    "TOKENIZERS_PARALLELISM": ("parallel", True),
    "LINES": ("first line\nsecond line", True),
}


@pytest.mark.parametrize("key", ["host.env", "log.wandb_project", "run.name"])
def test_which_values_no_message_shows(monkeypatch, key):
    monkeypatch.setattr(masking, "_secrets", set())
    for name, (value, _) in VALUES.items():
        monkeypatch.setenv(name, value)
        given = {name: "***"} if key == "host.env" else f"a${{oc.env:{name}}}"  # as a worker reads it
        OmegaConf.update(cfg := OmegaConf.create(), key, given)
        masking.note_interpolations(cfg)  # secrets of earlier configurations stay
    for name, (value, is_secret) in VALUES.items():
        hides = is_secret and (key != "run.name" or name in ("API_KEY", "PASSWORD"))
        assert masked(f"<{value}> {value!r}") == ("<***> '***'" if hides else f"<{value}> {value!r}"), name
    assert (masked("?q=open%20sesame%2F1") == "?q=***") == (key != "run.name")


def test_logs_streams_and_error_files_mask_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(masking, "_secrets", {"sesame", "open-sesame"})
    out = logs._MaskedText(raw := io.BytesIO(), encoding="utf-8")
    print("said", "open-sesame", 12345678, file=out, flush=True)
    assert raw.getvalue() == b"said *** 12345678\n"
    stamp = SimpleNamespace(count=0, _map=bytearray(512))
    stamps._Writer.put(stamp, "x" * 195 + "open-sesame", 1.0, 0)  # which is cut after 200 characters
    assert json.loads(stamp._map)[4] == "x" * 195 + "***"
    error, file = RuntimeError("GET /?key=open-sesame"), logs.LogFile(tmp_path / "rank0.log")
    file.emit(logging.LogRecord("a", logging.ERROR, "", 0, "%s", ("sesame",), (type(error), error, None)))
    file.close()
    write_failure(error, 1, tmp_path)
    written = [path.read_text() for path in sorted(tmp_path.iterdir())]
    assert len(written) == 2 and all("sesame" not in text and "key=***" in text for text in written)
    assert json.loads(written[0])["message"]["message"] == "RuntimeError: GET /?key=***"


LEAKS = """
import logging, os, sys, threading, warnings
from graphmoe.training.trainer import Trainer

def nothing(graph):
    return 0

def step(self):
    if self.step == 1:
        text = "log in as " + ", ".join(os.environ[name] for name in ("LOGIN", "TOKEN", "WORD", "LIMIT"))
        logging.getLogger("library").warning("%s", text)
        warnings.warn(text)
        print(text, file=sys.stderr)
        thread = threading.Thread(target=fail, args=(text,))
        thread.start()
        thread.join()
        fail(text)
    whole(self)

def fail(text):
    raise RuntimeError(f"GET https://host/?of={text}: 403")

whole, Trainer._train_step = Trainer._train_step, step
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [("launch.nproc=1",), ("launch.nproc=2",), ("optim.lr=1e-3", "-m")])
def test_no_error_or_log_line_of_code_of_ones_own_has_a_secret(tmp_path, own, monkeypatch, words):
    own("leaks", LEAKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    given = ["+host.env.LOGIN=alibaba-1", "+host.env.TOKEN='${oc.env:OTHER}'", "+host.env.LIMIT=123456789"]
    given += ["log.wandb_project=${oc.env:WORD}", "passes.extra=[leaks:nothing]", "train.val_batches=0"]
    given += ["hydra.run.dir=run", "hydra.sweep.dir=run", "hydra.sweep.subdir=.", "checkpoint.enabled=false"]
    values = {"OTHER": "sesame", "WORD": "open-sesame"}
    run = command(tmp_path, *TINY, *given, *words, seconds=120, environment=values)
    shown = "log in as ***, ***, ***, 123456789"
    assert run.wait() == 1 and shown in run.err.read_text(), run.err.read_text()
    files = {path.name: path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for name, text in {**files, "stdout": run.out.read_text(), "stderr": run.err.read_text()}.items():
        assert "alibaba" not in text and "sesame" not in text, name
    said = {name for name, text in files.items() if f"of={shown}: 403" in text}
    ranks = {"launch.nproc=1": 0, "launch.nproc=2": 2}.get(words[0], 1)  # in processes of their own
    assert said >= {"rank0.log", *(f"rank{rank}.error.json" for rank in range(ranks))}
    assert ("rank1.stderr.log" in said) == (ranks == 2) and ("job.json" in said) == (words[-1] == "-m")
