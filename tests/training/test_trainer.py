"""The training loop: batches, validation, and what the command line leaves behind."""

import html
import json
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml

from graphmoe.command.hydra import compose_config
from graphmoe.config.masking import to_plain
from graphmoe.data import first_batches
from graphmoe.data.tokenizer import load_tokenizer
from graphmoe.plan.layout import Layout
from graphmoe.plan.plan import plan_of
from graphmoe.plan.rules.unused import without_effect
from graphmoe.runtime.host.signals import StopSignal
from graphmoe.runtime.launch.failures import RunFailed
from graphmoe.runtime.ranks import Ranks
from graphmoe.training.evaluation import PROMPT_TOKENS, prompt_of
from graphmoe.training.run import _summarise, sample_of, warn_of_unused, warn_of_unused_ids
from graphmoe.training.step_sums import StepSums
from graphmoe.training.trainer import Trainer
from tests.damage import no_file_beyond
from tests.runs import (
    PRESETS,
    QUIET,
    TINY,
    Command,
    assert_same_runs,
    command,
    config,
    metrics,
    numbers,
    summary,
    train_in,
    trainer_in,
)
from tests.tolerances import TOLERANCES, relative_error


@pytest.mark.parametrize("aux_loss", ["none", "sequence", "global_batch"])
def test_one_and_four_micro_batches_give_the_same_gradient(tmp_path, aux_loss):
    found = []
    for size in (4, 1):
        overrides = (f"train.micro_batch_size={size}", f"model.aux_loss={aux_loss}", *QUIET)
        trainer = trainer_in(tmp_path, *overrides, "model.aux_loss_coef=0.1")
        batches = [next(trainer.loader) for _ in range(4 // size)]
        scalars, counts_LE, _ = trainer.steps.step.forward_backward(batches)
        found.append((trainer.optimizer.families[0].grad.clone(), scalars["loss"], counts_LE))
        trainer.loader.close()
    (one, loss, counts), (four, loss_of_four, counts_of_four) = found
    # of global_batch, the counts of later micro-batches are not known yet
    limit = 0.05 if aux_loss == "global_batch" else TOLERANCES[torch.float32].gradient
    assert relative_error(four, one) < limit
    assert relative_error(loss_of_four, loss) < TOLERANCES[torch.float32].forward
    assert torch.equal(counts, counts_of_four) and counts.sum() == 4 * 16 * 2


@pytest.mark.parametrize("coef, is_read", [(0.0, False), (0.1, True)])
def test_routers_are_told_of_earlier_micro_batches_where_they_read_them(tmp_path, coef, is_read):
    trainer = trainer_in(tmp_path, *QUIET, "model.aux_loss=global_batch", f"model.aux_loss_coef={coef}")
    for router in trainer.model.routers():
        router.earlier_counts.fill_(7)
    trainer._train_step()
    assert {bool((r.earlier_counts == 7).all()) for r in trainer.model.routers()} == {not is_read}
    trainer.loader.close()


def test_routers_are_told_of_the_slots_that_the_loss_counts(tmp_path, monkeypatch):
    words = ("model.aux_loss=global_batch", "model.aux_loss_coef=0.1", "train.micro_batch_size=1")
    trainer, told = trainer_in(tmp_path, *QUIET, *words), []
    for router in trainer.model.routers():
        router.selection_bias.copy_(10.0 * torch.arange(len(router.selection_bias)))
    monkeypatch.setattr(StepSums, "_tell_routers", lambda _, counts_LE, layers: told.append(counts_LE + 0))
    batches = [next(trainer.loader) for _ in range(4)]
    _, counts_LE, _ = trainer.steps.step.forward_backward(batches)
    trainer.loader.close()
    assert bool((counts_LE[:, :-2] == 0).all()), "the bias chooses the last two experts"
    for done, counted_LE in enumerate(told[:-1], start=1):
        assert counted_LE.sum(dim=1).tolist() == [done * 16 * 2] * len(counted_LE)
        assert bool((counted_LE[:, :-2].sum(dim=1) > 0).all()), "the best scores are others"


def test_validation_is_the_mean_over_the_same_first_batches_each_time(tmp_path):
    trainer = train_in(tmp_path, "optim.lr=1e-30", "model.selection_bias=false")
    rows = [row for row in metrics(tmp_path) if "val_loss" in row]
    assert [row["step"] for row in rows] == [1, 3, 6] and len({row["val_loss"] for row in rows}) == 1
    with torch.no_grad():
        batches = first_batches(trainer.corpus.val, 2, 2)
        losses = [trainer.model.loss(t[:, :-1], t[:, 1:]).cross_entropy.item() for t in batches]
    assert rows[0]["val_loss"] == pytest.approx(sum(losses) / 2)


@pytest.mark.parametrize(
    "words, validations, checkpoints",
    [
        ("train.val_interval=0 checkpoint.interval=0 train.log_interval=1", [1, 7], [7]),
        ("train.val_interval=2 checkpoint.interval=2 train.log_interval=4", [1, 2, 4, 6, 7], [2, 4, 6, 7]),
        ("train.val_batches=0 checkpoint.interval=7 train.log_interval=1000000000", [], [7]),
        ("train.val_interval=9 checkpoint.interval=9", [1, 7], [7]),
    ],
)
def test_validations_and_checkpoints_come_at_their_interval(tmp_path, words, validations, checkpoints):
    trainer = train_in(tmp_path, "train.steps=7", "checkpoint.keep_last=9", *words.split())
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows if "val_loss" in row] == validations
    assert [row["step"] for row in rows if "loss" in row] == [*range(1, 8)]
    assert trainer.saves.store.latest() == checkpoints[::-1]


def test_what_is_saved_and_logged_does_not_change_the_numbers(tmp_path):
    often = ("train.log_interval=1", "checkpoint.interval=1", "checkpoint.async_save=false")
    rarely = ("train.log_interval=6", "checkpoint.interval=0", "data.prefetch=0")
    assert_same_runs(tmp_path, (), often, rarely)


@pytest.mark.parametrize(
    "words",
    [
        "precision.compute=bf16", "model.num_dense_layers=2", "model.mtp_depth=2", "moe.force_balance=true",
        "model.num_dense_layers=0 model.shared_ffn_size=0 model.selection_bias=false",
        "model.attention=gqa model.num_kv_heads=1 model.head_dim=8 model.qk_norm=true",
        "model.num_experts=0 model.attention=gqa model.num_kv_heads=1 model.rope_scaling=llama3",
        "train.clip_grad_norm=0 optim.schedule=wsd",
    ],
)  # fmt: skip
def test_every_kind_of_model_trains_and_learns_a_constant(tmp_path, monkeypatch, words):
    trainer = trainer_in(tmp_path, *words.split(), "train.steps=12")
    batch = torch.arange(34).view(2, 17)
    monkeypatch.setattr("graphmoe.data.loader.Loader.__next__", lambda self: batch)
    assert trainer.run()
    losses = [row["loss"] for row in metrics(tmp_path) if "loss" in row]
    assert losses[-1] < losses[0] - 0.2


def test_the_command_leaves_all_its_files_and_one_json_document(tmp_path):
    words = ("format=json", "hydra.run.dir=run", "log.tensorboard=true", "log.peak_tflops=2", "train.steps=4")
    run, folder = Command(tmp_path, (*TINY, *words)), tmp_path / "run"
    created = psutil.Process(run.pid).create_time()
    assert run.wait() == 0, run.err.read_text()
    lifetime_s = time.time() - created
    document = json.loads(run.out.read_text())
    assert document == summary(folder)
    assert document["finished"] and document["steps"] == 4 and document["folder"] == str(folder)
    assert [document[f"{kind}_experts"] for kind in ("dead", "overfull")] == [0, 0]
    positive = ("final_loss", "final_val_loss", "median_step_s", "median_mfu", "peak_memory_gib")
    assert min(document[key] for key in (*positive, "device_memory_gib")) > 0
    # the start of a process is known to a second
    assert 0 < document["time_to_first_step_s"] < lifetime_s + 1
    resolved = yaml.safe_load((folder / "resolved.yaml").read_text())
    assert (resolved["run"]["name"], resolved["run"]["device"]) == ("mini", "cpu")
    assert resolved["run"]["auto"][0].startswith("moe.dispatcher=") and resolved["data"]["seq_len"] == 16
    environment = json.loads((folder / "env.json").read_text())
    assert torch.__version__.startswith(environment["packages"]["torch"]) and "git_commit" in environment
    threads, cores = environment["threads"], environment["usable_cores"]
    assert threads > 0 and cores > 0 and environment["workers_of_node"] == 1
    assert f"1 process ({environment['device']}, {threads} thread" in run.err.read_text()
    parts = [document[f"{key}_s"] for key in ("data", "validation", "checkpoint")]
    first, *rest = [row for row in metrics(folder) if "loss" in row]
    lasted = document["time_to_first_step_s"] + sum(parts[1:]) + sum(row["step_s"] for row in rest)
    assert min(parts) > 0 and lasted < lifetime_s + 1
    assert sum(row.get("data_s", 0.0) for row in rest) == pytest.approx(parts[0])
    assert first["start_s"] == document["time_to_first_step_s"] and not any("start_s" in row for row in rest)
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    log = (folder / "logs" / "rank0.log").read_text()
    assert log.count(" INFO step ") == 4 + 3 and "MFU = TFLOP/s over 2 dense bf16" in log
    assert not list(folder.glob("*.tmp"))


def test_a_run_on_text_ends_with_a_sample_and_its_tokenizer(tmp_path, text_words):
    words = ("hydra.run.dir=run", "log.sample_tokens=5", "log.report=true")
    run, folder = command(tmp_path, *TINY, *text_words, *words), tmp_path / "run"
    assert run.wait() == 0, run.err.read_text()
    shown, prompt = run.out.read_text(), summary(folder)["sample_prompt"]
    text = Path(text_words[1].removeprefix("data.paths=[").removesuffix("]")).read_text()
    assert len(prompt) > 8 and prompt in text
    given = json.dumps(prompt)
    assert f"A sample of what the model writes now, from {given} on:\n\n{prompt}" in shown
    said = f"at the end of the run, from <code>{html.escape(given)}</code> on"
    assert said in (folder / "report.html").read_text()
    assert "validation loss" in shown and shown.endswith("results: run\nreport: run/report.html\n")
    assert (folder / "tokenizer.json").is_file()


@pytest.fixture
def on_text(tmp_path, text_words) -> Trainer:
    return trainer_in(tmp_path, *text_words, "log.sample_tokens=5")


def test_a_rank_of_a_part_of_the_model_writes_no_sample(on_text, caplog):
    with caplog.at_level("INFO"):
        for on_text.model.layout in (Layout(tp=2), Layout(dp=2, ep=2)):
            assert sample_of(on_text, StopSignal()) == (None, None)  # others would not join it
    assert caplog.text.count("no sample of text: no rank has all weights") == 2
    on_text.model.layout = Layout(dp=2)
    assert all(sample_of(on_text, StopSignal()))


def test_a_sample_that_takes_long_is_said(on_text, caplog, monkeypatch):
    def generate(*_, **__):
        end = time.monotonic() + 20
        while "writing a sample of text (log.sample_tokens=5)" not in caplog.text:
            assert time.monotonic() < end
            yield ""

    monkeypatch.setattr("graphmoe.training.run.generate", generate)
    monkeypatch.setattr("graphmoe.config.progress.EVERY_S", 0.01)
    with caplog.at_level("INFO"):
        assert sample_of(on_text, StopSignal())[1] == ""


def test_a_signal_ends_a_sample_at_the_next_token(on_text, monkeypatch):
    def tokens(*_, **__):
        yield from "ab"
        signal.raise_signal(signal.SIGTERM)
        yield from "cd"

    monkeypatch.setattr("graphmoe.training.run.generate", tokens)
    with StopSignal() as stop:
        assert sample_of(on_text, stop)[1] == "ab"


def test_a_sample_goes_on_with_a_document_or_what_is_asked_for(on_text):
    corpus, tokenizer = on_text.corpus, on_text.corpus.tokenizer
    first = tokenizer.decode(corpus.val.documents.tokens(0, 0, PROMPT_TOKENS).tolist())
    assert prompt_of(corpus, tokenizer) == first == sample_of(on_text, StopSignal())[0]
    assert prompt_of(replace(corpus, val=None), tokenizer) != first  # of the text for training
    reader = SimpleNamespace(read=lambda start, count: corpus.val.sample(0)[None])
    streamed = prompt_of(replace(corpus, val=SimpleNamespace(reader=lambda: reader)), tokenizer)
    assert streamed == tokenizer.decode(corpus.val.sample(0)[:PROMPT_TOKENS].tolist())
    on_text.plan.log.sample_prompt = "the cat"
    prompt, text = sample_of(on_text, StopSignal())
    assert prompt == "the cat" and text.startswith("the cat")
    on_text.plan.log.sample_prompt = ""
    assert sample_of(on_text, StopSignal()) == (None, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", False), ("model.vocab_size=384", False),  # 320 ids, rounded up
        ("model.vocab_size=512", True),
        ("model.vocab_size=512 checkpoint.init_from=w", False),  # it is that of the weights
    ],
)  # fmt: skip
def test_a_vocabulary_with_many_rows_that_stand_for_no_token_is_warned_of(text_words, words, said, caplog):
    run = config(*text_words, *words.split())
    warn_of_unused_ids(plan_of(run, 1), load_tokenizer(run.data.tokenizer))
    warn_of_unused_ids(plan_of(run, 1), None)
    assert len(caplog.messages) == said
    if said:
        assert "model.vocab_size=512, and the tokenizer (data.tokenizer=" in caplog.text
        assert "192 rows" in caplog.text and "model.vocab_size=384 is enough" in caplog.text


@pytest.mark.parametrize("option", ["quick", "deterministic"])
def test_the_debug_options_run(tmp_path, option):
    of_tiny = [word for word in TINY if not word.startswith("train.log_interval")]
    small = {"quick": ["compile.enabled=false"], "deterministic": of_tiny}[option]
    run = command(tmp_path, *small, f"debug={option}", "hydra.run.dir=run", "train.steps=4")
    assert run.wait() == 0, run.err.read_text()
    resolved = yaml.safe_load((tmp_path / "run" / "resolved.yaml").read_text())
    assert resolved["train"]["log_interval"] == 1 and resolved["data"]["source"] == "synthetic"
    assert resolved["precision"]["deterministic"] is (option == "deterministic")
    assert "the learning rate only rises" not in run.err.read_text()  # nobody has asked for such a warm-up
    assert len([row for row in metrics(tmp_path / "run") if "loss" in row]) == 4


def test_a_bf16_run_starts_from_the_fp32_weights_of_another_not_from_their_rounding(tmp_path):
    bf16 = ("precision.compute=bf16", "train.steps=2")
    first = train_in(tmp_path / "a", *bf16)
    (tmp_path / "a" / "resolved.yaml").write_text(yaml.safe_dump(to_plain(first.plan.config)))
    second = trainer_in(tmp_path / "b", *bf16, f"checkpoint.init_from={tmp_path / 'a'}", "train.seed=1")
    assert any(not main.equal(main.bfloat16().float()) for main in first.optimizer.main)
    parts = [(*trainer.optimizer.main, *trainer.model.parameters()) for trainer in (first, second)]
    torch.testing.assert_close(*parts, rtol=0, atol=0)


def test_seeds_change_weights_and_data_and_nothing_else_does(tmp_path):
    first = train_in(tmp_path / "a", "train.steps=2")
    for number, overrides in enumerate((("train.seed=1",), ("data.seed=1",)), start=1):
        train_in(tmp_path / str(number), "train.steps=2", *overrides)
        assert numbers(tmp_path / str(number)) != numbers(tmp_path / "a")
    again = train_in(tmp_path / "b", "train.steps=2")
    torch.testing.assert_close(first.optimizer.weights, again.optimizer.weights, rtol=0, atol=0)


def test_a_summary_that_the_disk_does_not_take_is_an_error_that_says_what_to_do(tmp_path):
    trainer = train_in(tmp_path, "train.steps=1", "train.val_batches=0", "checkpoint.enabled=false")
    said = "summary.json cannot be written after step 1: File too large; free space and run the command again"
    with no_file_beyond(10), pytest.raises(RunFailed, match=said):
        _summarise(trainer, tmp_path, True, [trainer.memory], StopSignal())
    assert not (tmp_path / "summary.tmp").exists()


@pytest.mark.parametrize(
    "option", [f"model={name}" for name in PRESETS] + ["optim=adamw", "optim=muon", "debug=quick"]
)
def test_what_a_preset_sets_has_an_effect(option):
    assert [*without_effect(plan_of(compose_config(option), 1), 1)] == []


WARNED = """
profile.pipeline=true profile.ranks=[1] | profile.pipeline=true | profile.ranks=[1]
pipeline.costs=[moe:1] | pipeline.costs=[moe:1] NO parallel.pp=1
model.head_dim=8 | model.head_dim=8 NO model.attention=mla
model.yarn_factor=2 | model.yarn_factor=2.0 NO model.rope_scaling=none
optim.schedule=constant optim.min_lr_ratio=0.5 | optim.min_lr_ratio=0.5 NO optim.schedule=constant
model.aux_loss=none model.aux_loss_coef=0.02 | model.aux_loss_coef=0.02 NO model.aux_loss=none;
    model.aux_loss=micro_batch turns the loss on, model.aux_loss_coef=0 off
model.aux_loss=none model.aux_loss_coef=0
model.hf_family=qwen3_next model.aux_loss=none model.aux_loss_coef=0.02
SYMM moe.replica_slots=2 | moe.replica_slots=2 NO moe.balance=none: auto makes no replicas without the pass
model.peak_lr=9e-4 | optim.lr=0.01 is 11 times the 0.0009 that suits model=mini; model.peak_lr=
model.peak_lr=2e-3
optim.warmup_steps=8 train.steps=8
    | optim.warmup_steps=8 is not less than train.steps=8: the learning rate only rises
model.rope_scaling=yarn model.yarn_factor=2 model.yarn_original_context=7
    | data.seq_len=16 is beyond the 14 tokens that model.yarn_factor=2 times
optim.schedule=wsd optim.wsd_decay_fraction=0.5
checkpoint.enabled=false checkpoint.interval=100 checkpoint.keep_last=3
    | checkpoint.keep_last=3 NO checkpoint.enabled=false
precision.fp8_products=[attn] precision.fp8_wgrad=bf16 precision.fp8_skip_layers=[0]
    precision.fp8_measure=none
    | precision.fp8_products=[attn] NO precision.fp8=none | precision.fp8_wgrad=bf16 NO precision.fp8=none
    | precision.fp8_skip_layers=[0] NO precision.fp8=none | precision.fp8_measure=none NO precision.fp8=none
precision.fp8=rowwise precision.fp8_products=[experts] precision.fp8_wgrad=bf16 compile.enabled=true
    model.expert_ffn_size=16 SYMM moe.balance=replicas moe.replica_keep=true
    | moe.replica_keep=true NO precision.fp8= | precision.fp8_wgrad=bf16 has no
moe.receive_budget=worst_case moe.transport=pull | moe.receive_budget= | moe.transport=pull
moe.receive_budget=worst_case SYMM moe.balance=none
moe.receive_budget=2 SYMM moe.balance=replicas | moe.receive
moe.expert_load=burst | MOE.EXPERT_LOAD=burst IS ON: THE ROUTER IS IGNORED
parallel.ep=2 parallel.dp_shard=fsdp2 checkpoint.replica_check=5
    | checkpoint.replica_check=5 NO parallel.dp_shard=fsdp2: each rank holds other weights
checkpoint.replica_check=5 | checkpoint.replica_check=5 NO one rank
parallel.ep=2 checkpoint.replica_check=5
parallel.pp=2 pipeline.schedule=zb1p | pipeline.schedule=zb1p splits the backward
parallel.pp=2 pipeline.schedule=1f1b profile.pipeline=true
parallel.pp=4 model.num_layers=14 train.global_batch_size=64 pipeline.schedule=v_min
    | pipeline.schedule=v_min splits | pipeline.schedule=v_min is slower than 1f1b by simulation
"""


@pytest.mark.parametrize("line", WARNED.replace("\n    ", " ").strip().splitlines())
def test_settings_without_effect_or_by_mistake_are_named(caplog, line):
    symm = "moe.dispatcher=symm parallel.ep=2"
    words, *warnings = line.replace("SYMM", symm).replace(" NO ", " has no effect with ").split(" | ")
    ranks = Ranks()
    ranks.size = max(map(int, re.findall("[pe]p=([0-9])", words)), default=1)
    run = config(*words.split(), f"launch.nproc={ranks.size}")
    warn_of_unused(plan_of(run, ranks.size), ranks)
    assert len(caplog.messages) == len(warnings)
    assert all(map(str.startswith, caplog.messages, warnings))
