"""Automatic keys: a table of configurations and devices, and what each key becomes there."""

import math
import re

import pytest
import torch
import yaml

from graphmoe.config.formats import Gpu
from graphmoe.config.ranges import spelled
from graphmoe.config.schema import ConfigError
from graphmoe.plan.plan import plan_of
from graphmoe.plan.rules import violations
from graphmoe.plan.rules.auto import KEYS, undecided, value_of, with_values
from graphmoe.training import auto
from graphmoe.training.auto import Machine, decided
from graphmoe.training.memory import memory_of_places
from graphmoe.training.start_checks import check_memory
from tests.plan.costs.test_activations import MODEL
from tests.runs import command, config, numbers, undecided_config

HOPPER, BLACKWELL = Gpu(major=9, cuda=(13, 0)), Gpu(major=10, cuda=(13, 0))
FOUR = Machine(4, 4, HOPPER, math.inf)
ONE, FAR, CPUS = FOUR._replace(num_ranks=1, per_node=1), FOUR._replace(has_peers=False), Machine(4, 4)
OF_FOUR = ("launch.fake_world=null", "launch.nproc=4", "parallel.ep=4", "train.micro_batch_size=auto")
BATCH = "train.global_batch_size="
CASES = {  # words; devices; dispatcher, scope, overlap, size; what the reasons say
    "one node": (f"{BATCH}32", FOUR, "symm full_iteration true 4", "4 ranks of one node"),
    "one GPU": (f"parallel.ep=1 launch.nproc=1 {BATCH}32", ONE, "local full_iteration false 16", "each rank"),
    "16 of 24": (f"parallel.ep=1 launch.nproc=1 {BATCH}24", ONE, "local full_iteration false 8", "each rank"),
    "no peer access": (f"{BATCH}32", FAR, "alltoall partial false 8", "cannot map each other's memory"),
    "two nodes of two": (
        f"launch.nproc=2 {BATCH}32", FOUR._replace(per_node=2), "alltoall partial false 8", "several nodes",
    ),
    "two nodes of four": (
        f"{BATCH}32", FOUR._replace(num_ranks=8), "symm full_iteration false 4", "one node",
    ),
    "one sequence a rank": (f"{BATCH}4", FOUR, "symm full_iteration false 1", "one node"),
    "three sequences a rank": (f"{BATCH}12", FOUR, "symm full_iteration true 1", "one node"),
    "a pipeline": (f"parallel.pp=2 parallel.ep=2 {BATCH}64", FOUR, "symm full_iteration false 4", "2 ranks"),
    "a short pipeline": (f"parallel.pp=2 parallel.ep=2 {BATCH}8", FOUR, "symm full_iteration false 1", ""),
    "a pipeline of pairs": (
        f"parallel.pp=2 parallel.ep=2 pipeline.schedule=zbv pipeline.ep_overlap=true {BATCH}32",
        FOUR, "symm full_iteration true 2", "",
    ),
    "counted micro-batches": (
        f"parallel.pp=2 parallel.ep=2 pipeline.microbatches=8 {BATCH}48",
        FOUR, "symm full_iteration false 3", "",
    ),
    "a recorded pipeline": (
        f"parallel.pp=2 parallel.ep=2 profile.pipeline=true {BATCH}64", FOUR, "symm partial false 4", "",
    ),
    "fsdp2": (f"parallel.dp_shard=fsdp2 {BATCH}32", FOUR, "symm full_iteration true 4", "one node"),
    "eager": (f"compile.enabled=false {BATCH}32", FOUR, "symm full_iteration false 4", "not projected"),
    "CPUs": (f"{BATCH}32", CPUS, "alltoall none false 4", "no GPU"),
    "given": (
        "moe.dispatcher=alltoall graph.scope=none pipeline.ep_overlap=false train.micro_batch_size=2"
        f" {BATCH}32", FOUR, "alltoall none false 2", "",
    ),
    "a given size": (f"train.micro_batch_size=8 {BATCH}32", FOUR, "symm full_iteration false 8", ""),
    "a given scope": (f"graph.scope=partial {BATCH}32", FOUR, "symm partial true 4", ""),
    "a given stage": (f"moe.sync_free_stage=1 {BATCH}32", FOUR, "symm partial true 4", ""),
}  # fmt: skip


def run_of(*words):
    return undecided_config(*MODEL, *OF_FOUR, *words)


def choices(found):
    keys = ("moe.dispatcher", "graph.scope", "pipeline.ep_overlap", "train.micro_batch_size")
    return " ".join(spelled(value_of(found, key)) for key in keys)


def test_values_of_an_earlier_run_name_no_code(tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(tmp_path)
    found = decided(run_of(f"{BATCH}32"), FOUR, {"moe.dispatcher": "evil:make"})
    assert found.moe.dispatcher == "symm" and "as before" not in str(found.run.auto)


@pytest.mark.parametrize(("words", "machine", "wanted", "said"), CASES.values(), ids=CASES)
def test_what_automatic_keys_become(words, machine, wanted, said):
    given = run_of(*words.split())
    found = decided(given, machine)
    assert (choices(found), violations(found), undecided(found)) == (wanted, [], [])
    assert found.launch == given.launch and said in " ".join(found.run.auto)
    noted = [note.partition("=")[0] for note in found.run.auto]
    assert noted == undecided(given) and all(
        value_of(given, key) == value_of(found, key) for key in {*KEYS} - {*noted}
    )
    assert decided(found, machine) is found


def test_the_size_is_the_largest_that_leaves_a_twentieth_of_the_memory():
    words = ("parallel.ep=1", "launch.nproc=1", f"{BATCH}16")
    (place,) = memory_of_places(plan_of(decided(run_of(*words), ONE), 1), on_nvidia=True)
    for memory, size, more in ((place.total / 0.9499, 16, ""), (place.total / 0.9501, 8, r"; 16 need \S+")):
        found = decided(run_of(*words), ONE._replace(memory=memory))
        assert found.train.micro_batch_size == size
        assert re.fullmatch(rf"train.micro_batch_size={size} \(\S+ of \S+ GB{more}\)", found.run.auto[-1])


PIPELINE = ("parallel.ep=1", "parallel.pp=4", "model.num_layers=6", f"{BATCH}32", "profile.pipeline=true")


@pytest.mark.parametrize(
    ("words", "key", "larger", "smaller"),
    [((f"{BATCH}8",), "pipeline.ep_overlap", True, False), (PIPELINE, "graph.scope", "partial", "none")],
)
def test_what_does_not_fit_is_left_out(words, key, larger, smaller):
    given = run_of(*words, "train.micro_batch_size=1")
    found = decided(given, FOUR)
    assert value_of(found, key) == larger
    needed = max(place.total for place in memory_of_places(plan_of(found, 4), on_nvidia=True))
    for memory, value in ((needed / 0.9501, smaller), (needed / 0.9499, larger)):
        assert value_of(decided(given, FOUR._replace(memory=memory)), key) == value


def test_a_run_without_room_for_one_sequence_gets_the_error_of_the_start(monkeypatch):
    found = decided(run_of(f"{BATCH}32"), FOUR._replace(memory=1e6))
    assert choices(found) == "symm none false 1" and "of 0.0 GB" in found.run.auto[-1]
    monkeypatch.setattr("graphmoe.training.start_checks.memory_of", lambda device: 10**6)
    with pytest.raises(ConfigError, match="weights, gradients and moments take"):
        check_memory(plan_of(found, 4), torch.device("cpu"))


@pytest.mark.parametrize(
    ("gpu", "recipe"),
    [(HOPPER, "rowwise"), (BLACKWELL, "mxfp8"), (Gpu("gfx942"), "rowwise"), (Gpu("gfx950"), "mxfp8")]
    + [(Gpu(major=8), None), (Gpu("gfx90a"), None), (None, None)],
    ids=str,
)
def test_the_recipe_of_a_device(gpu, recipe):
    given = run_of(f"{BATCH}32", "precision.fp8=auto", "model.expert_ffn_size=96")
    if recipe:
        assert decided(given, FOUR._replace(gpu=gpu)).precision.fp8 == recipe
    else:
        with pytest.raises(ConfigError, match=r"^precision.fp8=auto needs .*; use precision.fp8=none$"):
            decided(given, FOUR._replace(gpu=gpu))


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("precision.fp8=auto precision.fp8_measure=none", "precision.fp8_measure=none does not; use"),
        ("train.micro_batch_size=0", "must be greater than 0, a whole number, or auto"),
        ("train.micro_batch_size=two", "train.micro_batch_size=two must be"),
        ("pipeline.ep_overlap=1", "pipeline.ep_overlap=1 must be true, false or auto"),
        ("graph.scope=layer moe.dispatcher=alltoall", "graph.scope=layer captures"),
    ],
)
def test_values_that_no_machine_allows_are_refused_before_any_is_asked(word, said):
    with pytest.raises(ConfigError, match=said):
        run_of(*word.split())


def test_what_only_peer_memory_allows_is_refused_without_it():
    given = run_of("graph.scope=layer", f"{BATCH}32")
    assert decided(given, FOUR).moe.dispatcher == "symm"
    with pytest.raises(ConfigError, match="graph.scope=layer captures .*moe.dispatcher=alltoall lets"):
        decided(given, FAR)


def test_values_of_the_run_that_goes_on_are_kept_unless_rules_refuse_them():
    earlier = {"moe.dispatcher": "alltoall", "moe.balance": "none", "graph.scope": "none"}
    earlier["train.micro_batch_size"] = 2
    given = run_of(f"{BATCH}32")
    found = decided(given, FOUR, earlier)
    assert choices(found) == "alltoall none false 2"
    assert "train.micro_batch_size=2 (as before)" in found.run.auto
    for damaged in ({"train.micro_batch_size": 3}, {"graph.scope": [["a"]]}, {"moe.balance": "x"}):
        assert choices(decided(given, FOUR, {**earlier, **damaged})) == choices(decided(given, FOUR))


def test_the_same_command_goes_on_with_the_size_of_the_run(tmp_path):
    """A size that this machine would not choose stands for a run of another one."""
    words = ("data=synthetic", "model.num_layers=2", "data.seq_len=32", "compile=none", "train.steps=4")
    words += ("log.report=false", "train.val_batches=0", "checkpoint.interval=2", f"{BATCH}8")
    first = command(tmp_path, *words, "run.name=run", "train.micro_batch_size=2")
    assert first.wait() == 0, first.err.read_text()
    folder = tmp_path / "outputs" / "run"
    rows = numbers(folder)
    (folder / "summary.json").unlink()
    again = command(tmp_path, *words, "run.name=run")
    assert again.wait() == 0 and "train.micro_batch_size=2 (as before)" in again.err.read_text()
    stored = yaml.safe_load((folder / "resolved.yaml").read_text())
    assert stored["train"]["micro_batch_size"] == 2 and numbers(folder) == rows
    other = command(tmp_path, *words, "run.name=other", f"checkpoint.resume_from={folder}", "train.steps=6")
    assert other.wait() == 0 and "train.micro_batch_size=2 (as before)" in other.err.read_text()


def test_the_machine_is_asked_for_peers_memory_and_architecture(monkeypatch):
    run = config("launch.nproc=2", "train.global_batch_size=8")
    run = with_values(run, {"run.device": "cuda"})
    properties = type("P", (), {"total_memory": 5, "gcnArchName": "gfx942:x"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for count, able, permitted, has_peers in (
        (2, True, "0", True), (2, False, "0", False), (1, True, "0", False), (1, True, "1", True),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b, able=able: able)
        monkeypatch.setenv(auto.SHARED_GPUS, permitted)
        found = auto.this_machine(run)
        assert found[:2] == (2, 2) and found[3:] == (5, has_peers, True)
    assert auto.this_machine(with_values(run, {"launch.fake_world": 64}))[:2] == (64, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert auto.this_machine(run) == Machine(2, 2)


def test_scopes_in_which_experts_would_wait_for_the_host_are_left_out(monkeypatch):
    here = FOUR._replace(is_here=True)
    for capability, scope in (((9, 0), "full_iteration"), ((8, 0), "partial")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        given = run_of(f"{BATCH}32", "passes.disabled=[fuse_experts]")
        assert decided(given, here).graph.scope == scope
