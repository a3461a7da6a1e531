"""Code of a user's own, outside the package, is named by ``package.module:NAME`` and trains."""

import json
import re
import sys
from dataclasses import replace

import pytest
import torch

from graphmoe.checkpoint import CheckpointError
from graphmoe.checkpoint.hf.families import to_hf_config
from graphmoe.config import choices
from graphmoe.config.schema import ConfigError
from graphmoe.data import sources
from graphmoe.info import show
from graphmoe.model.attention import KINDS
from graphmoe.model.build import build_model
from graphmoe.model.sizes import count_parameters
from graphmoe.ops.grouped_mlp import BACKENDS
from graphmoe.optim import RULES
from graphmoe.optim.rule import DECAYS
from graphmoe.optim.storage import kept_of
from graphmoe.plan import attention
from graphmoe.plan.experts import FACTS
from graphmoe.plan.plan import plan_of
from graphmoe.plan.rules import check
from graphmoe.runtime.dispatch import MAKERS
from graphmoe.runtime.ranks import Ranks
from graphmoe.training.memory import memory_of_places
from graphmoe.worker import projected_memory
from tests.distributed.layouts import FSDP, Case, assert_same
from tests.distributed.ranks import run_ranks
from tests.runs import COMPILED, ROOT, assert_same_state, config, final_state, metrics, train_in, trainer_in

QUIET = ("train.val_batches=0", "checkpoint.enabled=false", "train.log_interval=1")


def rows_of(folder, key, *words):
    train_in(folder, *QUIET, *words)
    return [row[key] for row in metrics(folder) if key in row]


def test_a_data_source(own, tmp_path):
    code = """
import numpy as np
from graphmoe.data.corpus import Corpus
from graphmoe.data.samples import Samples

class Counting(Samples):
    def __init__(self, seq_len, vocab_size, first):
        self.seq_len, self.vocab_size, self.first = seq_len, vocab_size, first
        self.num_samples, self.fingerprint = None, f"counting:{first}"

    def sample(self, position):
        return (self.first + position + np.arange(self.seq_len + 1)) % self.vocab_size

def counting(config, seq_len, vocab_size):
    return Corpus(Counting(seq_len, vocab_size, 0), Counting(seq_len, vocab_size, 7))
"""
    own("own_sources", code)
    words = ("data.source=own_sources:counting", "train.steps=40", "train.val_interval=40")
    losses = rows_of(tmp_path / "run", "val_loss", *words, "train.val_batches=2")
    assert losses[-1] < losses[0] - 1, "the next number is easy to guess"
    with pytest.raises(
        ConfigError, match="needs Corpus.end_token, which data.source=own_sources:counting does"
    ):
        trainer_in(tmp_path / "masked", *words, "data.document_mask=true")


def test_kernels_of_the_experts(own, tmp_path, as_traced):
    code = """
import torch
from graphmoe.ops.grouped_mlp.reference import Products, Stepwise

calls, ops = [], torch.ops.graphmoe
def products(dtype):
    calls.append(dtype)
    return Products(ops.grouped_mm, ops.grouped_mm_dgrad, ops.grouped_mm_wgrad)
mine = Stepwise(products, lambda *_: None)
"""
    own("own_experts", code)
    words = (*QUIET, *COMPILED, "train.steps=2", "compile.cache=false", "checkpoint.enabled=true")
    losses = []
    for name in ("torch", "own_experts:mine"):
        trained = train_in(tmp_path / name, *words, f"moe.experts={name}")
        assert trained.execution.chosen.experts == ",".join([name] * 3)
        losses.append([row["loss"] for row in metrics(tmp_path / name) if "loss" in row])
    assert losses[0] == losses[1] and len(sys.modules["own_experts"].calls) > 0


def test_a_dispatcher(own, tmp_path):
    code = """
from graphmoe.plan.experts import DispatcherFacts
from graphmoe.runtime.dispatch.alltoall import AllToAll

class Mine:
    facts = DispatcherFacts(reads_peers=False, sync_free_stage=1)
    made = []
    @classmethod
    def make(cls, plan, mesh, factor):
        cls.made.append(factor)
        return AllToAll(mesh, plan.model.num_experts)
"""
    own("own_dispatchers", code)
    names, words = ("alltoall", "own_dispatchers:Mine"), ("loss", "train.steps=3")
    theirs, ours = (rows_of(tmp_path / name, *words, f"moe.dispatcher={name}") for name in names)
    assert theirs == ours and sys.modules["own_dispatchers"].Mine.made == [1.0]


SCHEDULE = """
from graphmoe.plan.pipeline import Action, Placement, Table
from graphmoe.plan.pipeline.schedules import Schedule

def in_pairs(num_ranks, num_micro_batches, virtual_stages):
    def steps(rank):
        for first in range(0, num_micro_batches, 2):
            pair = range(first, min(first + 2, num_micro_batches))
            yield from (Action(kind, rank, number) for kind in "FB" for number in pair)
    ranks = tuple(tuple(steps(rank)) for rank in range(num_ranks))
    return Table("in_pairs", Placement.loop(num_ranks), num_micro_batches, ranks)

mine = Schedule(in_pairs, "two micro-batches there, then back")
"""


def test_a_pipeline_schedule(own, tmp_path):
    own("own_pipelines", SCHEDULE)
    cases = {name: Case(2, "pp=2", name, (), ("train.steps=3",)) for name in ("gpipe", "own_pipelines:mine")}
    found = run_ranks(tmp_path, {name.replace(":", "_"): case.training for name, case in cases.items()})
    (theirs, _), (ours, _) = found.values()
    assert torch.equal(theirs.rows, ours.rows) and len(ours.rows) == 3
    plan = plan_of(cases["own_pipelines:mine"].training.config, 2)
    assert plan.pipeline.table.schedule == "own_pipelines:mine"
    assert [*map(str, plan.pipeline.table.ranks[1][:5])] == ["1F0", "1F1", "1B0", "1B1", "1F2"]


def test_a_pipeline_schedule_that_no_ranks_could_run_is_refused(own):
    two_ranks = "launch.nproc=2", "launch.nodes=1", "parallel.pp=2"
    own("wrong_pipelines", f"{SCHEDULE.replace('FB', 'BF')}\nno_schedule = in_pairs\n")
    for name, words in {
        "mine": "rank 0 at 0B0 waits for 0F0, which is later on rank 0",
        "no_schedule": "is a function; name a graphmoe.plan.pipeline.schedules.Schedule",
    }.items():
        with pytest.raises(ConfigError, match=rf"pipeline.schedule=wrong_pipelines:{name}:? {words}"):
            config(*two_ranks, f"pipeline.schedule=wrong_pipelines:{name}")


OPTIMIZER = """
from graphmoe.optim.rule import UpdateRule

def momentum(weight, gradient, moments, step):
    (velocity,), (beta,) = moments, step.numbers
    velocity = beta * velocity + gradient
    return weight - step.lr * velocity, velocity

mine = UpdateRule(("velocity",), lambda config: (config.beta1,), momentum)
"""


def test_an_optimizer_steps_as_torch_does_and_resumes_bitwise(own, tmp_path):
    own("own_optimizers", OPTIMIZER)
    words = ("optim.name=own_optimizers:mine", "optim.weight_decay=0", "optim.schedule=constant")
    once = trainer_in(tmp_path / "once", *words, "train.clip_grad_norm=0")
    weights = [weight.detach().clone() for weight in once.optimizer.weights]
    theirs = torch.optim.SGD(weights, lr=1e-2, momentum=0.9)
    for _ in range(2):
        once._train_step()
        for weight, gradient in zip(weights, once.optimizer._gradients.values(), strict=True):
            weight.grad = gradient.total.clone()
        theirs.step()
    torch.testing.assert_close(once.optimizer.weights, weights, rtol=1e-6, atol=1e-8)
    once.loader.close()
    whole = train_in(tmp_path / "whole", *words, "train.steps=6", "checkpoint.interval=3")
    state = final_state(tmp_path / "whole", tmp_path / "scratch", *words)
    assert "optimizer.velocity.embed.weight" in state and not any("exp_avg" in name for name in state)
    source = f"checkpoint.resume_from={tmp_path}/whole/checkpoints/step_00000003"
    second = train_in(tmp_path / "second", *words, "train.steps=6", source)
    assert_same_state(final_state(tmp_path / "second", tmp_path / "scratch2", *words), state)
    torch.testing.assert_close(whole.optimizer.weights, second.optimizer.weights, rtol=0, atol=0)
    with pytest.raises(CheckpointError, match=r"(?s)does not fit the state .*optimizer\.velocity\."):
        train_in(tmp_path / "third", "train.steps=6", source)


def test_the_moments_of_an_optimizer_are_counted(own, capsys):
    own("own_optimizers", OPTIMIZER)
    found = []
    for name in ("adamw", "own_optimizers:mine"):
        run = config(f"optim.name={name}", "compile.enabled=true", "format=json")
        (place,) = memory_of_places(plan_of(run, 1), on_nvidia=True)
        show(run)
        shown = json.loads(capsys.readouterr().out)["memory_bytes"]["moments_fp32"]
        found.append((place.state["moments"], shown, kept_of(run.optim)[0].bytes_moved))
    (of_two, shown_of_two, moved), (of_one, shown_of_one, less) = found
    assert 2 * of_one == of_two > 0 and 2 * shown_of_one == shown_of_two > 0 and (moved, less) == (34, 26)


def test_an_optimizer_on_two_ranks(own, tmp_path):
    own("own_optimizers", OPTIMIZER)
    cases = [Case(2, layout, model=("optim.name=own_optimizers:mine",)) for layout in ("", FSDP)]
    found = run_ranks(tmp_path, {str(case): case.training for case in cases})
    alone = cases[0].alone(Ranks(), tmp_path / "alone")
    for case in cases:
        assert_same(case, found[str(case)], alone)


OWN_ATTENTION = ("model.attention=own_attention:Mine", "model.num_heads=2")


def example(name):
    """The code of CONTRIBUTING that begins with a file's name."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return re.search(rf"```python\n# {name}\n(.*?)```", text, re.S)[1]


@pytest.fixture
def own_attention(own):
    """gqa with as many key-value heads, of one size."""
    own("own_attention", example("my_attention.py"))


def test_an_attention(own_attention, tmp_path, as_traced):
    head = config().model.hidden_size // 2
    same = ("model.attention=gqa", "model.num_heads=2", "model.num_kv_heads=2", f"model.head_dim={head}")
    words = (*COMPILED, "train.steps=3", "compile.cache=false")
    theirs = rows_of(tmp_path / "gqa", "loss", *words, *same)
    ours = rows_of(tmp_path / "mine", "loss", *words, *OWN_ATTENTION)
    assert theirs == pytest.approx(ours, rel=1e-5) and len({*theirs}) == 3


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_an_axis_that_an_attention_does_not_declare_is_refused(axis, own_attention):
    said = rf"parallel.{axis}=2 .* model.attention=own_attention:Mine .* use parallel.{axis}=1, or .* or gqa"
    with pytest.raises(ConfigError, match=said):
        check(config(*OWN_ATTENTION, f"parallel.{axis}=2", "launch.nproc=2"))


def test_a_document_mask_that_an_attention_does_not_take_is_refused(own_attention):
    said = "the facts of model.attention=own_attention:Mine do not set documents; use .* or gqa, or"
    with pytest.raises(ConfigError, match=said):
        check(config(*OWN_ATTENTION, "data.document_mask=true", "data.document_length=5"))


def test_memory_that_an_attention_does_not_declare_is_not_projected_and_it_has_no_family(own_attention):
    run = config(*OWN_ATTENTION, "compile.enabled=true")
    why_not = projected_memory(plan_of(run, 1))["why_not"]
    assert "the facts of model.attention=own_attention:Mine do not say what its backward saves" in why_not
    with pytest.raises(ConfigError, match="no known Hugging Face family .*=own_attention:Mine; .* gqa"):
        to_hf_config(run.model)


OWN_LAYERS = """
from graphmoe.model.layer import DenseLayer, MoELayer

class Dense(DenseLayer):
    made = []
    def __init__(self, *args):
        super().__init__(*args)
        self.made.append(self)

class Same(MoELayer):
    dense = Dense

    def segments(self, index=None):
        self.asked = index
        return super().segments(index)
"""


@pytest.fixture
def own_layers(own):
    own("own_layers", example("my_layers.py") + OWN_LAYERS)


def test_a_layer_trains_and_its_dense_layers_are_its_own(own_layers, tmp_path):
    losses = {}
    for name in ("standard", "own_layers:Same", "own_layers:Sandwich"):
        trained = train_in(tmp_path / name, *QUIET, "train.steps=3", f"model.layer={name}")
        losses[name] = [row["loss"] for row in metrics(tmp_path / name) if "loss" in row]
    standard, same, sandwich = losses.values()
    assert standard == same != sandwich and len(sandwich) == 3
    assert sys.modules["own_layers"].Dense.made
    weights = dict(trained.model.named_parameters())
    assert not weights["layers.1.attn.norm.weight"].eq(1).any(), "its norm learns"


def test_a_layer_compiles_to_what_it_is(own_layers, tmp_path, as_traced):
    words = (*COMPILED, "train.steps=3", "compile.cache=false", "model.layer=own_layers:Sandwich")
    words += ("data.document_mask=true", "data.document_length=5")
    switches = ("compile.enabled=false", "compile.enabled=true")
    plain, compiled = (rows_of(tmp_path / each, "loss", *words, each) for each in switches)
    assert compiled == pytest.approx(plain, rel=1e-5)


def test_what_is_not_known_of_a_layer_is_refused(own_layers):
    run = config("model.layer=own_layers:Sandwich", "compile.enabled=true")
    assert "model.layer=own_layers:Sandwich saves unknown" in projected_memory(plan_of(run, 1))["why_not"]
    with pytest.raises(ConfigError, match="no known Hugging Face family .*=own_layers:Sandwich; .* standard"):
        to_hf_config(run.model)
    standard = count_parameters(replace(run.model, layer="standard"))["total"]["full"]
    assert count_parameters(run.model)["total"]["full"] == standard + run.model.hidden_size
    no_axis = "parallel.tp=2 .* model.layer=own_layers:Sandwich has no tp in axes"
    with pytest.raises(ConfigError, match=no_axis):
        config("model.layer=own_layers:Sandwich", "parallel.tp=2", "launch.nproc=2")
    with pytest.raises(ConfigError, match="model.layer=json:JSONDecoder does not derive from .*MoELayer"):
        build_model(replace(run.model, layer="json:JSONDecoder"), device="meta")


def test_names_of_choices_are_the_rows_of_their_tables():
    of_layers = {kind.value for kind in choices.LinearAttention} - {"none"}
    assert {*choices.ATTENTIONS.names} | of_layers == {*attention.FACTS} == {*KINDS}
    assert {*choices.OPTIMIZERS.names} == {*RULES}
    of_conf = {path.stem for path in (ROOT / "conf" / "data").glob("*.yaml")}
    assert {*choices.DATA_SOURCES.names} == {*sources.OPEN} == of_conf
    assert {*choices.LR_SCHEDULES.names} == {*DECAYS, "constant"}
    assert {*choices.EXPERTS_BACKENDS.names} == {*BACKENDS, "auto"}
    assert {*choices.DISPATCHERS.names} == {*FACTS, "auto"} == {*MAKERS, "auto"}
