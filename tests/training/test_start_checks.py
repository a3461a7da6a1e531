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
from safetensors.torch import load_file

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
from graphmoe.training.export import write_folder
from graphmoe.training.start_checks import check_memory, check_start, least_bytes, state_of_places
from tests.command.test_convert import CONFIG, assert_same_weights, random_model
from tests.damage import flip_bit
from tests.runs import ROOT, TINY, config, slow_but, train_in


def run_in(folder: Path, *words: str) -> Path:
    """Train, and leave the configuration as a command does."""
    trainer = train_in(folder, *words)
    (folder / "resolved.yaml").write_text(yaml.safe_dump(to_plain(trainer.plan.config)))
    return folder


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    return run_in(tmp_path_factory.mktemp("start") / "first")


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_start(config(*words))
    return str(caught.value)


def test_a_continued_run_replaces_only_the_export_that_it_named(first, tmp_path):
    run, own, other = tmp_path / "run", tmp_path / "own", tmp_path / "other"
    plain = "model.selection_bias=false"  # which a family has
    shutil.copytree(first, run)
    stored = yaml.safe_load((run / "resolved.yaml").read_text())
    stored["checkpoint"]["export"] = str(own)
    (run / "resolved.yaml").write_text(yaml.safe_dump(stored))
    for folder in (own, other):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    check_start(config(f"checkpoint.export={own}", plain), run)
    with pytest.raises(ConfigError, match="other is not empty; use a new folder or an empty one"):
        check_start(config(f"checkpoint.export={other}", plain), run)


def test_an_export_says_that_it_advances_for_each_tensor(tmp_path):
    trainer, notes = train_in(tmp_path / "run", "model.selection_bias=false"), []
    files = write_folder(
        trainer.plan, tmp_path / "out", trainer.optimizer, trainer.ranks, on_tensor=lambda: notes.append(1)
    )
    (weights,) = (path for path in files if path.suffix == ".safetensors")
    assert len(notes) == len(load_file(weights)) + 1  # and the file


REFUSED = {
    "checkpoint.resume_from=nowhere": r"checkpoint\.resume_from=nowhere: nowhere holds no",
    "checkpoint.init_from=nowhere": r"checkpoint\.init_from=nowhere: nowhere is no",
    "model.attention_backend=padded_flash": "backend=padded_flash needs a GPU and the device is cpu",
    "compile.enabled=true passes.disabled=[fuse_rooter]": "no pass fuse_rooter; there are fuse_permutation",
    "train.tokens=1e6": "train.steps=6 and train.tokens=.*leave one out",
    "train.epochs=2": "train.steps=6 and train.epochs=.*leave one out",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_start_is_refused_before_data_or_a_folder_are_taken(tmp_path, monkeypatch, capsys, words):
    for name in ("training.setup.open_data", "run.folder.claim"):
        monkeypatch.setattr(f"graphmoe.{name}", lambda *a, **k: pytest.fail("data or a folder are taken"))
    if words.startswith("checkpoint"):
        with pytest.raises(ConfigError, match=f"^{REFUSED[words]}"):
            training.run_worker(plan_of(config(words), 1), tmp_path, Ranks())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["graphmoe.train", *TINY, *words.split(), "hydra.run.dir=run"])
    with pytest.raises(SystemExit) as caught:
        train.main()
    shown = capsys.readouterr().err
    assert caught.value.code == 2 and re.search(f"error: .*{REFUSED[words]}", shown)
    assert "Traceback" not in shown and not [*tmp_path.glob("run/*.json"), *tmp_path.glob("outputs")]


def test_a_run_starts_from_checkpoints_that_fit_and_no_others(first):
    for key in ("resume_from", "init_from"):
        for place in ("", "/checkpoints", "/checkpoints/step_00000003"):
            check_start(config(f"checkpoint.{key}={first}{place}"))
        head, *tensors = refusal(f"checkpoint.{key}={first}", "model.expert_ffn_size=16").splitlines()
        assert head.startswith(f"checkpoint.{key}={first}: {first} is of another model")
        assert "model.expert_ffn_size: 8 -> 16" in head
        assert any("moe_experts.w_down" in line for line in tensors)
    bf16 = "precision.compute=bf16"
    assert "not of the same precision" in refusal(f"checkpoint.resume_from={first}", bf16)
    check_start(config(f"checkpoint.init_from={first}", bf16))
    check_start(config("checkpoint.resume_from=nowhere"), first)  # it goes on in its own folder
    assert CheckpointStore.open_any(first).latest() == [6, 3]


@pytest.mark.parametrize("ties", [True, False])
def test_another_kind_of_head_is_refused_from_a_run_and_from_folders_of_weights(tmp_path, ties):
    words = [f"model.tie_embeddings={str(kind).lower()}" for kind in (ties, not ties)]
    run_in(tmp_path / "run", words[0], "train.steps=1", "train.val_batches=0")
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


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def memory(monkeypatch):
    def has(size: float) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=size, available=size))

    return has


def test_a_model_larger_than_the_memory_is_refused_with_the_sizes_unless_ranks_share_them(memory):
    check_memory(plan_of(config(), 1), CPU)
    huge = dataclasses.replace(config(), model=ModelConfig(num_layers=10_000, num_experts=512))
    of_one = r"10000 and model.num_experts=512 has [\d,]+ parameters.* GiB"
    for ranks, said in ((1, of_one), (8, r"take [\d.]+ GiB on each of 8 ranks")):
        with pytest.raises(ConfigError, match=f"{said}.*, and this cpu has .* GiB"):
            check_memory(plan_of(huge, ranks), CPU)
    few = "data.seq_len=1", "train.micro_batch_size=1"  # whose activations are next to nothing
    run = config("precision.compute=bf16", *few)
    memory(0.6 * 18 * count_parameters(run.model)["total"]["full"])
    for ranks in (1, 2):  # of two (6 + 18 / 2) / 18 = 0.83
        with pytest.raises(ConfigError):
            check_memory(plan_of(run, ranks), CPU)
    check_memory(plan_of(run, 8), CPU)  # (6 + 18 / 8) / 18 = 0.46
    plan = plan_of(config("launch.nproc=4", "train.global_batch_size=8"), 4)
    memory(3.5 * max(map(sum, least_bytes(plan, state_of_places(plan)))))
    with pytest.raises(ConfigError, match=r"GiB free for each of 4 ranks; use"):
        check_memory(plan, CPU)


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


MANY = "train.micro_batch_size=200000 train.global_batch_size=200000"
LEAST = {
    "eager": (), "eager, bf16, again": ("precision.compute=bf16", "recompute.all=true"),
    "eager, a large head": ("model.vocab_size=8192",),
    "ep and tp": ("launch.fake_world=4", "parallel.ep=4", "parallel.tp=2", "train.global_batch_size=8"),
    "pp": ("launch.fake_world=2", "parallel.pp=2", "train.global_batch_size=8"),
    "compiled": ("compile.enabled=true", "model.num_layers=1", "model.vocab_size=4096"),
}  # fmt: skip


@pytest.mark.parametrize("words", slow_but(LEAST, *list(LEAST)[:-1]))
def test_the_least_that_a_run_needs_is_less_than_a_dry_run_takes(words):
    sizes = ("data.seq_len=256", "model.context_length=256", "train.micro_batch_size=4", "model.mtp_depth=0")
    run = config(*sizes, "launch.fake_world=1", *words)
    found = dry_run(run)
    plan = plan_of(run, found["world"])
    place = found["pipeline"]["pp_rank"] if found["pipeline"] else 0
    least = sum(least_bytes(plan, state_of_places(plan))[place])
    assert 0.35 < least / found["memory"]["peak_bytes"] <= 1


ACTIVATIONS = r"activations and logits .* take at least [\d.]+ GiB .* this cpu has 2.0 GiB free; use "
ALONE = r".*alone take [\d.]+ GiB, and there are 2.0 GiB"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("data.seq_len=4000000 model.context_length=4000000", ACTIVATIONS), (MANY, ACTIVATIONS),
        (f"{MANY} compile.enabled=true recompute.all=true", ACTIVATIONS),
        (f"{MANY} model.vocab_size=60000", ACTIVATIONS),
        ("data.prefetch=300000000", f"the batches that are read ahead {ALONE}"),
        ("train.val_batches=300000000", f"the batches of a validation {ALONE}"),
        ("train.log_interval=2000000000 train.steps=1000000000", f"the metrics {ALONE}"),
    ],
)  # fmt: skip
def test_too_large_a_size_is_refused_with_one_that_fits(words, said, memory):
    memory(2**31)
    key = words.partition(" ")[0].replace("=2000000000", "=1000000000")  # no more than train.steps
    with pytest.raises(ConfigError, match=f"^{key}: {said}") as told:
        check_memory(plan_of(config(*words.split()), 1), CPU)
    if said == ACTIVATIONS:
        assert ("recompute=all or" in str(told.value)) == ("recompute" not in words)
    smaller = str(told.value).rpartition("at most ")[2]
    check_memory(plan_of(config(*words.split(), smaller, smaller.replace("micro", "global")), 1), CPU)


COMPILED, STAGE_3 = "compile.enabled=true", "moe.sync_free_stage=3"
PASS = "compile.enabled=true with the pass fuse_experts"


@pytest.mark.parametrize(
    ("words", "fuses", "needed"),
    [
        (("moe.sync_free_stage=2",), False, PASS), ((STAGE_3,), False, PASS),
        ((COMPILED, STAGE_3, "moe.experts=torch"), True, "moe.experts=auto"),
        ((STAGE_3, "moe.experts=torch"), False, f"{PASS} and moe.experts=auto"),
        # fused experts, lower stages and dense models do not wait
        *(((COMPILED, f"graph.scope={scope}"), True, "") for scope in ("layer", "moe", "[moe_experts]")),
        ((COMPILED, STAGE_3, "moe.experts=triton"), True, ""), (("moe.sync_free_stage=1",), False, ""),
        ((COMPILED, "moe.experts=torch"), True, ""), ((COMPILED, "graph.scope=partial"), True, ""),
        ((STAGE_3, "model.num_dense_layers=2"), False, ""),
    ],
    ids=str,
)  # fmt: skip
def test_experts_that_wait_for_the_host_break_the_promise_of_a_stage(monkeypatch, words, fuses, needed):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))  # Hopper
    plans = {dtype: plan_of(config(*words, f"precision.compute={dtype}"), 1) for dtype in ("bf16", "fp32")}
    refuse_waiting_experts(plans["bf16"], GPU, fuses=fuses)
    refuse_waiting_experts(plans["fp32"], CPU, fuses=fuses)
    with pytest.raises(ConfigError) if needed else nullcontext() as caught:
        refuse_waiting_experts(plans["fp32"], GPU, fuses=fuses)
    if needed:
        said, stage = str(caught.value), plans["fp32"].config.moe.sync_free_stage
        assert said.startswith(f"moe.sync_free_stage={stage} (graph.scope=")
        ways = f"use {needed}, precision.compute=bf16, or moe.sync_free_stage=auto"
        assert said.endswith(f"in torch.float32 do on this device; {ways}")


@pytest.mark.parametrize(
    "word, waits",
    [
        ("graph.scope=none", True), ("graph.scope=partial", True), ("moe.sync_free_stage=2", False),
        ("graph.scope=layer", False), ("graph.scope=full_iteration", False),
    ],
)  # fmt: skip
def test_backends_that_wait_are_left_out_where_the_stage_forbids_them(monkeypatch, word, waits):
    asked = []

    def choose(requested, *rest, sync_free):
        asked.append((requested, sync_free))
        return requested

    monkeypatch.setattr(execution, "choose_backends", choose)
    for remembered, requested in (("torch,torch,torch", "auto"), ("", "auto"), ("", "torch")):
        run = config(word, COMPILED, f"moe.experts={requested}")
        assert chosen_experts(plan_of(run, 1), CPU, None, remembered) == (remembered or requested)
    # auto takes only those that never wait, whatever the stage; a checkpoint's and named ones may at 0 and 1
    assert asked == [("torch,torch,torch", not waits), ("auto", True), ("torch", not waits)]


@pytest.mark.parametrize(
    "layout, tokens, width, experts, top_k",
    [
        (Layout(dp=4), 32, 8, 4, 2), (Layout(dp=4, ep=2), 64, 8, 2, 1), (Layout(dp=4, ep=4), 64, 8, 1, 1),
        (Layout(dp=4, etp=2), 64, 4, 4, 2), (Layout(dp=2, tp=2, ep=2, etp=2), 64, 4, 2, 1),
    ],
    ids=str,
)  # fmt: skip
def test_kernels_are_measured_for_the_experts_of_a_rank(layout, tokens, width, experts, top_k):
    sizes = [f"parallel.{name}={getattr(layout, name)}" for name in ("tp", "ep", "etp")]
    words = ("model.top_k=2", "train.micro_batch_size=2", "data.seq_len=16", "train.global_batch_size=8")
    shape = mlp_shape(plan_of(config(*words, *sizes), layout.dp * layout.tp))
    assert (tokens, width, experts, top_k) == (shape.T, shape.F, shape.E, shape.K)
    # of all ranks together, a row for each slot of each token on each of the etp ranks of its expert
    assert shape.T * shape.K * layout.size("stage") == 32 * 2 * layout.dp * layout.etp


def imported_by(code: str) -> set[str]:
    """Names of the modules of a new process that has run some code."""
    line = [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"]
    ran = subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True)
    return set(ran.stdout.split())


def test_compilers_are_imported_by_what_compiles_alone():
    compilers = ["_functorch.aot_autograd", "_inductor.compile_fx", "_inductor.runtime.triton_heuristics"]
    compilers = {f"torch.{name}" for name in compilers}
    starts = "import graphmoe.training.setup, graphmoe.training.dry_run"
    builds = "from graphmoe.config.schema import ModelConfig; from graphmoe.model.build import build_model"
    found = imported_by(f"{starts}; {builds}; build_model(ModelConfig())")
    assert not found & {*compilers, "torch._dynamo"}
    compiles = "from graphmoe.runtime import torch_compat; torch_compat.import_compilers()"
    assert imported_by(compiles) >= compilers
