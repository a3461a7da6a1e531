"""Runs from a Hugging Face folder to a Hugging Face folder: every bit, tokenizer files, refusals, resumes."""

import json
import os
import signal
from functools import partial
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError

from graphmoe import save_hf
from graphmoe.checkpoint.hf.differences import same_function
from graphmoe.checkpoint.hf.folder import open_hf
from graphmoe.command.hydra import read_words, to_config
from graphmoe.config.masking import to_plain
from graphmoe.plan.plan import plan_of
from graphmoe.run.folder import write_config
from graphmoe.runtime.launch.failures import RunFailed
from graphmoe.training.auto import decided
from graphmoe.training.export import export
from graphmoe.training.setup import build_trainer
from tests.command.test_convert import CONFIG, random_model
from tests.distributed.ranks import run_ranks
from tests.distributed.training import quiet_trainer
from tests.parity.hf_models import tensors_in
from tests.parity.test_documented_families import IN_BF16, OF_FAMILY, trained_model, write_published
from tests.runs import STEP, Command, command, hydra_config, metrics, slow_but, summary

SMALL = (
    "data=synthetic", "data.seq_len=16", "run.device=cpu", "compile=none", "train.steps=2",
    "train.global_batch_size=4", "train.micro_batch_size=1", "train.val_batches=0", "log.report=false",
    "log.tensorboard=false", "optim.warmup_steps=0",
)  # fmt: skip


def config_of(*words, after=()):
    words = [*words, *SMALL, *after]
    return decided(to_config(hydra_config(*read_words(words), with_hydra=False)))


def run_of(config, folder, ranks=None):
    """The trainer of a run, with the configuration in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if ranks is None:
        trainer = build_trainer(plan_of(config, 1), folder, mock.MagicMock())
    else:
        trainer = quiet_trainer(config, folder, ranks)[0]
    if trainer.ranks.is_first:
        write_config(folder, to_plain(config))
    trainer.ranks.barrier()
    return trainer


def same_weights(one, other):
    """Whether two folders, which may store experts otherwise, hold the same bits in the same dtype."""
    one, other = open_hf(one), open_hf(other)
    assert not same_function(one.config, other.config) and one.dtype() == other.dtype()
    assert one.shapes == other.shapes
    read = [{n: f.read(n, (slice(None),), torch.float32) for n in f.shapes} for f in (one, other)]
    assert [name for name in one.shapes if not torch.equal(*(each[name] for each in read))] == []


@pytest.mark.parametrize("family", slow_but([*OF_FAMILY], "qwen3_moe", "bailing_moe_v2"))
@pytest.mark.parametrize("dtype", slow_but(["bf16", "fp32"], "bf16"))
def test_untouched_weights_are_the_same_bits(tmp_path, family, dtype):
    with mock.patch("tests.parity.test_documented_families.IN_BF16", [family] * (dtype == "bf16")):
        text = write_published(tmp_path / "hf", family, tmp_path / "text")
    config = config_of(f"checkpoint.init_from={tmp_path / 'hf'}", f"checkpoint.export={tmp_path / 'out'}")
    assert (config.precision.compute.name, config.optim.lr, config.model.peak_lr) == (dtype, 1e-5, 1e-5)
    trainer = run_of(config, tmp_path / "run")
    export(trainer.plan, trainer.folder, trainer.optimizer, trainer.ranks, lambda: None)
    same_weights(text, tmp_path / "out")


LAYOUTS = {
    "ep": ("deepseek_v2", "parallel.ep=2"), "pp": ("deepseek_v3", "parallel.pp=2"),
    "tp": ("qwen3_moe", "parallel.tp=2"), "fsdp": ("deepseek_v3", "parallel.dp_shard=fsdp2"),
    "zero1": ("qwen3", "parallel.dp=2"),
}  # fmt: skip


def exported_by(ranks, folder, config):
    trainer = run_of(config, folder, ranks)
    export(trainer.plan, folder, trainer.optimizer, ranks, lambda: None)
    ranks.on_first(lambda: (folder / "out").rename(folder / "untouched"))
    with mock.patch("graphmoe.training.export.DEFAULT_SHARD", "20KB"):
        trainer.run()
    failed = mock.patch("graphmoe.checkpoint.hf.tensor_files.save_file", side_effect=SafetensorError("full"))
    with failed, pytest.raises(RunFailed, match=r"could not be written: .* full; python .* overwrite=true"):
        export(trainer.plan, folder, trainer.optimizer, ranks, lambda: None)


@pytest.mark.slow
def test_several_ranks_write_what_they_hold(tmp_path):
    cases = {}
    for name, (family, layout) in LAYOUTS.items():
        write_published(tmp_path / name / "hf", family, None)
        words = (f"model={tmp_path / name / 'hf'}", f"checkpoint.export={tmp_path / name / 'out'}")
        cases[name] = partial(
            exported_by, config=config_of(*words, layout, "launch.nproc=2", "optim.lr=1e-2")
        )
    run_ranks(tmp_path, cases)
    for name, (family, _) in LAYOUTS.items():
        same_weights(tmp_path / name / "hf", tmp_path / name / "untouched")
        assert (tmp_path / name / "out" / "model.safetensors.index.json").is_file()
        dtype = torch.bfloat16 if family in IN_BF16 else torch.float32
        found, wanted = open_hf(tmp_path / name / "out"), trained_model(tmp_path / name, dtype).state_dict()
        read = {key: found.read(key, (slice(None),), torch.float32).float() for key in found.shapes}
        assert found.dtype() == dtype and read.keys() == wanted.keys()
        assert [key for key in wanted if not torch.equal(read[key], wanted[key])] == [], name


@pytest.fixture
def hf(tmp_path, monkeypatch):
    """A folder with a tokenizer, more files of it, and files that nobody should copy."""
    monkeypatch.chdir(tmp_path)
    folder, model = tmp_path / "hf", random_model()
    save_hf(model.to(torch.bfloat16), CONFIG, folder, token_ids={"bos_token_id": 3, "eos_token_id": [4, 5]})
    (folder / "chat_template.jinja").write_bytes(b"{{ messages }}\r\n")
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 5], "top_p": 0.5}')
    (folder / "modeling.py").write_text("raise SystemExit")
    (tmp_path / "secret").write_text("a secret")
    (folder / "vocab.json").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "merges.txt")
    return folder


TRAIN = ("checkpoint.init_from=hf", "checkpoint.export=out", *SMALL)


def test_one_command_copies_the_tokenizer_and_no_code(hf, tmp_path):
    run = command(tmp_path, *TRAIN)
    assert run.wait() == 0, run.err.read_text()
    assert "exported out (deepseek_v3)" in run.err.read_text()
    copied = {"chat_template.jinja", "generation_config.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == copied | {
        "config.json",
        "model.safetensors",
    }
    assert all((tmp_path / "out" / name).read_bytes() == (hf / name).read_bytes() for name in copied)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (raw["bos_token_id"], raw["eos_token_id"], raw["torch_dtype"]) == (3, [4, 5], "bfloat16")
    again = command(tmp_path, *TRAIN)
    assert again.wait() == 2
    assert again.err.read_text().splitlines()[-1] == (
        "error: checkpoint.export=out is not empty; use a new folder or an empty one"
    )
    assert not (tmp_path / "outputs" / "hf-2").exists()


def test_what_cannot_be_exported_is_refused_before_it_trains(hf, tmp_path):
    for word in ("checkpoint.export=secret", "checkpoint.export=secret/out"):
        run = command(tmp_path, *TRAIN, word)
        said = run.err.read_text().splitlines()[-1]
        assert (
            run.wait() == 2
            and said == f"error: {word}: {tmp_path}/secret is not a folder; use another folder"
        )
    run = command(tmp_path, *TRAIN, "checkpoint.export=./hf")
    assert run.wait() == 2 and "export=./hf is the folder that the run starts from" in run.err.read_text()
    run = command(tmp_path, "model=tiny_gqa", "model.attention_gate=true", "checkpoint.export=out", *SMALL)
    assert (
        run.wait() == 2 and "error: checkpoint.export=out: no Hugging Face family can" in run.err.read_text()
    )
    assert "model.attention_gate=True" in run.err.read_text()
    assert not (tmp_path / "outputs").exists() and not (tmp_path / "out").exists()


def test_a_stopped_run_exports_and_its_resume_replaces_that(hf, tmp_path):
    words = (*TRAIN, "train.steps=9")
    run = Command(tmp_path, words, slow={STEP: 0.3})
    run.wait_for_rows(tmp_path / "outputs/hf", 1)
    run.kill(signal.SIGINT)
    assert run.wait() == 130, run.err.read_text()
    first = tensors_in(tmp_path / "out")
    assert not summary(tmp_path / "outputs/hf")["finished"]
    (tmp_path / "out" / ".model.tmp-1").mkdir()  # as of a killed export
    assert command(tmp_path, *words).wait() == 0
    assert [row["step"] for row in metrics(tmp_path / "outputs/hf") if "loss" in row] == [*range(1, 10)]
    second = tensors_in(tmp_path / "out")
    assert first.keys() == second.keys() and any(not first[n].equal(second[n]) for n in first)
    assert not (tmp_path / "out" / ".model.tmp-1").exists()
