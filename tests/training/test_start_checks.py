"""Before the first step: folders to start from, sizes and experts that are refused, and what is imported."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml

from graphmoe import save_hf, train
from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.config.masking import to_plain
from graphmoe.config.schema import ConfigError, ModelConfig
from graphmoe.convert import ConvertArgs, convert
from graphmoe.model.build import build_model
from graphmoe.model.sizes import count_parameters
from graphmoe.plan.layout import Layout
from graphmoe.plan.plan import plan_of
from graphmoe.run.weights import load_weights
from graphmoe.runtime.ranks import Ranks
from graphmoe.training import executor as execution
from graphmoe.training import run as training
from graphmoe.training.dry_run import dry_run
from graphmoe.training.executor import chosen_experts, mlp_shape, refuse_waiting_experts
from graphmoe.training.start_checks import check_memory, check_start, least_bytes, state_of_places
from tests.command.test_convert import CONFIG, assert_same_weights, random_model
from tests.damage import flip_bit
from tests.runs import ROOT, TINY, config, slow_but, train_in


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "first"
    trainer = train_in(folder)
    (folder / "resolved.yaml").write_text(yaml.safe_dump(to_plain(trainer.plan.config)))
    return folder


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_start(config(*words))
    return str(caught.value)


@pytest.mark.parametrize("key", ["resume_from", "init_from"])
def test_a_start_is_refused_before_data_are_opened_or_a_folder_is_claimed(tmp_path, monkeypatch, capsys, key):
    monkeypatch.setattr("graphmoe.training.setup.open_data", lambda *a, **k: pytest.fail("data are opened"))
    monkeypatch.setattr("graphmoe.run.folder.claim", lambda *a, **k: pytest.fail("a folder is claimed"))
    said = f"checkpoint.{key}=nowhere: nowhere (holds|is) no"
    with pytest.raises(ConfigError, match=f"^{said}"):
        training.run_worker(plan_of(config(f"checkpoint.{key}=nowhere"), 1), tmp_path, Ranks())
    monkeypatch.chdir(tmp_path)
    words = ["graphmoe.train", *TINY, f"checkpoint.{key}=nowhere", "hydra.run.dir=run"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as caught:
        train.main()
    assert caught.value.code == 2 and re.search(f"error: {said}", capsys.readouterr().err)


@pytest.mark.parametrize("place", ["", "/checkpoints", "/checkpoints/step_00000003"])
def test_a_run_starts_from_a_checkpoint_that_fits(first, place):
    for key in ("resume_from", "init_from"):
        check_start(config(f"checkpoint.{key}={first}{place}"))


@pytest.mark.parametrize("key", ["resume_from", "init_from"])
def test_another_model_is_refused_by_its_keys_and_tensors(first, key):
    message = refusal(f"checkpoint.{key}={first}", "model.expert_ffn_size=16")
    head, *tensors = message.splitlines()
    assert head.startswith(f"checkpoint.{key}={first}: {first} is of another model")
    assert "model.expert_ffn_size: 8 -> 16" in head and any("moe_experts.w_down" in line for line in tensors)


@pytest.mark.parametrize("ties", [True, False])
def test_another_kind_of_head_is_refused_from_a_run_and_from_folders_of_weights(tmp_path, ties):
    words = [f"model.tie_embeddings={str(kind).lower()}" for kind in (ties, not ties)]
    trainer = train_in(tmp_path / "run", words[0], "train.steps=1", "train.val_batches=0")
    (tmp_path / "run" / "resolved.yaml").write_text(yaml.safe_dump(to_plain(trainer.plan.config)))
    resumed = refusal(f"checkpoint.resume_from={tmp_path}/run", words[1])
    assert f"another model (model.tie_embeddings: {ties} -> {not ties}; its own -> this run's)" in resumed
    assert "loss_head.head.weight" in resumed
    started = refusal(f"checkpoint.init_from={tmp_path}/run", words[1])
    assert f"{words[1]}, but " in started and f"; use {words[0]}, or" in started
    own = replace(CONFIG, tie_embeddings=ties)
    model = random_model(own)
    save_hf(model, own, tmp_path / "hf")
    convert(ConvertArgs(from_=tmp_path / "hf", to=tmp_path / "own"))
    for folder in (tmp_path / "hf", tmp_path / "own"):
        target, other = (build_model(replace(own, tie_embeddings=kind), seed=7) for kind in (ties, not ties))
        load_weights(target, folder)
        assert_same_weights(target.state_dict(), model.state_dict())
        before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        with pytest.raises(ConfigError, match=f"{words[1]}, but {folder} is"):
            load_weights(other, folder)
        assert_same_weights(other.state_dict(), before)


def test_another_precision_is_refused_for_the_whole_state_and_fine_for_weights(first):
    message = refusal(f"checkpoint.resume_from={first}", "precision.compute=bf16")
    assert "not of the same precision" in message
    check_start(config(f"checkpoint.init_from={first}", "precision.compute=bf16"))


def test_damage_that_sizes_show_is_named(first, tmp_path):
    shutil.copytree(first, tmp_path / "copy")
    newest, older = (tmp_path / f"copy/checkpoints/step_0000000{step}" for step in (6, 3))
    (newest / "__0_0.distcp").write_bytes(b"short")
    check_start(config(f"checkpoint.resume_from={tmp_path}/copy"))  # the one before is whole
    (older / "manifest.json").write_text(json.dumps({"format": 1, "files": {}}))
    message = refusal(f"checkpoint.resume_from={tmp_path}/copy")
    assert "damaged checkpoints only: __0_0.distcp: 5 bytes" in message and "must name .metadata" in message


def test_damage_that_only_the_contents_show_names_the_key_too(first, tmp_path):
    shutil.copytree(first / "checkpoints" / "step_00000006", tmp_path / "copy" / "step_00000006")
    flip_bit(tmp_path / "copy" / "step_00000006" / "__0_0.distcp")
    for key in ("resume_from", "init_from"):
        if key == "init_from":
            shutil.copy(first / "resolved.yaml", tmp_path / "copy")
        with pytest.raises(Exception, match=f"^checkpoint.{key}={tmp_path}/copy: .* are damaged"):
            train_in(tmp_path / key, f"checkpoint.{key}={tmp_path}/copy")


def test_a_run_that_goes_on_in_its_folder_does_not_ask_for_where_it_began(first):
    check_start(config("checkpoint.resume_from=nowhere"), first)
    assert CheckpointStore.open_any(first).latest() == [6, 3]


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def memory(monkeypatch):
    def has(num_bytes: float) -> None:
        memory = SimpleNamespace(total=num_bytes, available=num_bytes)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    return has


def test_a_model_larger_than_the_memory_is_refused_with_the_sizes_unless_ranks_share_them(memory):
    check_memory(plan_of(config(), 1), CPU)
    huge = dataclasses.replace(config(), model=ModelConfig(num_layers=10_000, num_experts=512))
    for ranks, said in (
        (1, r"10000 has [\d,]+ parameters.* GiB"),
        (8, r"take [\d.]+ GiB on each of 8 ranks"),
    ):
        with pytest.raises(ConfigError, match=f"{said}.*, and this cpu has .* GiB"):
            check_memory(plan_of(huge, ranks), CPU)
    few = "data.seq_len=1", "train.micro_batch_size=1"  # whose activations are next to nothing
    run = config("precision.compute=bf16", *few)
    memory(0.6 * 18 * count_parameters(run.model)["total"]["full"])
    for ranks in (1, 2):  # of two (6 + 18 / 2) / 18 = 0.83
        with pytest.raises(ConfigError):
            check_memory(plan_of(run, ranks), CPU)
    check_memory(plan_of(run, 8), CPU)  # (6 + 18 / 8) / 18 = 0.46


def test_with_a_pipeline_the_ranks_that_hold_most_are_those_that_count(memory):
    run = config(
        "launch.nproc=4", "parallel.pp=4", "pipeline.layout=E|t|tttt|tL", "model.num_layers=6",
        "train.global_batch_size=8",
    )  # fmt: skip
    plan = plan_of(run, 4)
    assert plan.pipeline is not None
    needed = state_of_places(plan)
    assert max(needed) == needed[2] > 1.5 * sum(needed) / 4
    memory(0.99 * max(needed))
    with pytest.raises(ConfigError, match=r"on rank 2 of parallel.pp=4 \(t\*4\).* a pipeline.layout that"):
        check_memory(plan, CPU)
    memory(1.01 * sum(map(sum, least_bytes(plan, needed))))
    check_memory(plan, CPU)


@pytest.mark.parametrize(
    "words, message",
    [
        ("data.prefetch=300000000", "data.prefetch=300000000: the batches that are read ahead"),
        ("train.val_batches=300000000", "train.val_batches=300000000: the batches of a validation"),
        (
            "train.log_interval=2000000000 train.steps=1000000000",
            "train.log_interval=1000000000: the metrics",
        ),
    ],
)
def test_batches_larger_than_the_memory_are_refused_with_a_size_that_fits(words, message, memory):
    memory(2**31)
    said = rf"{message} .*alone take [\d.]+ GiB, and there are 2.0 GiB"
    with pytest.raises(ConfigError, match=said) as told:
        check_memory(plan_of(config(*words.split()), 1), CPU)
    smaller = str(told.value).rpartition("use at most ")[2]
    check_memory(plan_of(config(*words.split(), smaller, smaller.replace("micro", "global")), 1), CPU)


MANY = "train.micro_batch_size=200000 train.global_batch_size=200000"
LEAST = {
    "eager": (),
    "eager, bf16, again": ("precision.compute=bf16", "recompute.all=true"),
    "eager, a large head": ("model.vocab_size=8192",),
    "ep and tp": ("launch.fake_world=4", "parallel.ep=4", "parallel.tp=2", "train.global_batch_size=8"),
    "pp": ("launch.fake_world=2", "parallel.pp=2", "train.global_batch_size=8"),
    "compiled": ("compile.enabled=true", "model.num_layers=1", "model.vocab_size=4096"),
}


@pytest.mark.parametrize("words", slow_but(LEAST, *list(LEAST)[:-1]))
def test_the_least_that_a_run_needs_is_less_than_a_dry_run_takes(words):
    sizes = ("data.seq_len=256", "model.context_length=256", "train.micro_batch_size=4", "model.mtp_depth=0")
    run = config(*sizes, "launch.fake_world=1", *words)
    found = dry_run(run)
    plan = plan_of(run, found["world"])
    place = found["pipeline"]["pp_rank"] if found["pipeline"] else 0
    least = sum(least_bytes(plan, state_of_places(plan))[place])
    assert 0.35 < least / found["memory"]["peak_bytes"] <= 1


@pytest.mark.parametrize(
    "words",
    [
        "data.seq_len=4000000 model.context_length=4000000",
        MANY,
        f"{MANY} compile.enabled=true recompute.all=true",
        f"{MANY} model.vocab_size=60000",
    ],
)
def test_activations_for_which_no_memory_is_free_are_refused_with_a_size_that_fits(words, memory):
    memory(2**31)
    key = words.partition(" ")[0]
    said = rf"^{key}: activations and logits .* take at least [\d.]+ GiB .* this cpu has 2.0 GiB free; use "
    with pytest.raises(ConfigError, match=said) as told:
        check_memory(plan_of(config(*words.split()), 1), CPU)
    assert ("recompute=all or" in str(told.value)) == ("recompute" not in words)
    smaller = str(told.value).rpartition("at most ")[2]
    check_memory(plan_of(config(*words.split(), smaller, smaller.replace("micro", "global")), 1), CPU)


def test_ranks_of_a_cpu_share_its_memory(memory):
    run = config("launch.nproc=4", "train.global_batch_size=8")
    plan = plan_of(run, 4)
    memory(3.5 * max(map(sum, least_bytes(plan, state_of_places(plan)))))
    with pytest.raises(ConfigError, match=r"GiB free for each of 4 ranks; use"):
        check_memory(plan, CPU)


COMPILED, STAGE_3 = "compile.enabled=true", "moe.sync_free_stage=3"
PASS = "compile.enabled=true with the pass fuse_experts"


@pytest.mark.parametrize(
    ("words", "fuses", "needed"),
    [
        (("moe.sync_free_stage=2",), False, PASS),
        ((STAGE_3,), False, PASS),
        ((COMPILED, STAGE_3, "moe.experts=torch"), True, "moe.experts=auto"),
        ((STAGE_3, "moe.experts=torch"), False, f"{PASS} and moe.experts=auto"),
        # fused experts, lower stages and dense models do not wait
        ((COMPILED, "graph.scope=layer"), True, ""),
        ((COMPILED, "graph.scope=moe"), True, ""),
        ((COMPILED, "graph.scope=[moe_experts]"), True, ""),
        ((COMPILED, STAGE_3, "moe.experts=triton"), True, ""),
        (("moe.sync_free_stage=1",), False, ""),
        ((COMPILED, "moe.experts=torch"), True, ""),
        ((COMPILED, "graph.scope=partial"), True, ""),
        ((STAGE_3, "model.num_dense_layers=2"), False, ""),
    ],
    ids=str,
)
def test_experts_that_wait_for_the_host_break_the_promise_of_a_stage(monkeypatch, words, fuses, needed):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))  # Hopper
    plans = {dtype: plan_of(config(*words, f"precision.compute={dtype}"), 1) for dtype in ("bf16", "fp32")}
    refuse_waiting_experts(plans["bf16"], GPU, fuses=fuses)
    refuse_waiting_experts(plans["fp32"], CPU, fuses=fuses)
    with pytest.raises(ConfigError) if needed else nullcontext() as caught:
        refuse_waiting_experts(plans["fp32"], GPU, fuses=fuses)
    if needed:
        stage = plans["fp32"].config.moe.sync_free_stage
        assert str(caught.value).startswith(f"moe.sync_free_stage={stage} (graph.scope=")
        ways = f"use {needed}, precision.compute=bf16, or moe.sync_free_stage=auto"
        assert str(caught.value).endswith(f"in torch.float32 do on this device; {ways}")


@pytest.mark.parametrize(
    "words, auto, torchs",
    [
        (("graph.scope=none",), False, False),
        (("graph.scope=partial",), False, False),
        (("moe.sync_free_stage=2",), True, True),
        (("graph.scope=layer",), True, True),
        (("graph.scope=full_iteration",), True, True),
    ],
    ids=str,
)
def test_backends_that_wait_are_left_out_where_the_stage_forbids_them(monkeypatch, words, auto, torchs):
    asked = []

    def choose(requested, *rest, sync_free):
        asked.append((requested, sync_free))
        return requested

    monkeypatch.setattr(execution, "choose_backends", choose)
    for remembered, requested in (("torch,torch,torch", "auto"), ("", "auto"), ("", "torch")):
        run = config(*words, COMPILED, f"moe.experts={requested}")
        assert chosen_experts(plan_of(run, 1), CPU, None, remembered) == (remembered or requested)
    # auto takes only those that never wait, whatever the stage; a checkpoint's and named ones may at 0 and 1
    assert asked == [("torch,torch,torch", auto), ("auto", True), ("torch", torchs)]


@pytest.mark.parametrize(
    "layout, tokens, width, experts, top_k",
    [
        (Layout(dp=4), 32, 8, 4, 2),
        (Layout(dp=4, ep=2), 64, 8, 2, 1),
        (Layout(dp=4, ep=4), 64, 8, 1, 1),
        (Layout(dp=4, etp=2), 64, 4, 4, 2),
        (Layout(dp=2, tp=2, ep=2, etp=2), 64, 4, 2, 1),
    ],
    ids=str,
)
def test_kernels_are_measured_for_the_experts_of_a_rank(layout, tokens, width, experts, top_k):
    sizes = [f"parallel.{name}={getattr(layout, name)}" for name in ("tp", "ep", "etp")]
    words = ("model.top_k=2", "train.micro_batch_size=2", "data.seq_len=16", "train.global_batch_size=8")
    shape = mlp_shape(plan_of(config(*words, *sizes), layout.dp * layout.tp))
    assert (tokens, width, experts, top_k) == (shape.T, shape.F, shape.E, shape.K)
    # of all ranks together, a row for each slot of each token on each of the etp ranks of its expert
    assert shape.T * shape.K * layout.size("stage") == 32 * 2 * layout.dp * layout.etp


COMPILERS = {
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch._inductor.runtime.triton_heuristics",
}


def imported_by(code: str) -> set[str]:
    """Names of the modules of a new process that has run some code."""
    script = f"import sys\n{code}\nprint(*sys.modules)"
    line = [sys.executable, "-c", script]
    ran = subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True)
    return set(ran.stdout.split())


def test_compilers_are_imported_by_what_compiles_alone():
    starts = "import graphmoe.training.setup, graphmoe.training.dry_run"
    builds = "from graphmoe.config.schema import ModelConfig; from graphmoe.model.build import build_model"
    found = imported_by(f"{starts}; {builds}; build_model(ModelConfig())")
    assert not found & {*COMPILERS, "torch._dynamo"}
    compiles = "from graphmoe.runtime import torch_compat; torch_compat.import_compilers()"
    assert imported_by(compiles) >= COMPILERS
