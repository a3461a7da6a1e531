"""Saved activations in host memory: the gradients of those on the device, what is stored, what is fetched."""

import gc
import weakref

import pytest
import torch

from graphmoe.config.schema import ConfigError
from graphmoe.plan.rules import check
from graphmoe.runtime.compile import host_activations
from graphmoe.runtime.compile.host_activations import HostActivations, Saved, offloading
from graphmoe.segments import LAYER_SEGMENTS, Segment, run_segments
from graphmoe.training.dry_run import dry_run
from tests.plan.costs.test_activations import MODEL
from tests.runs import assert_same_state, config, numbers, train_in
from tests.runtime.test_compiled import batch, executor, model_of
from tests.runtime.test_recompute import graphs_of, kept_without, layer_gradients, recompute
from tests.training.test_memory import LARGER, memory_of

pytestmark = pytest.mark.usefixtures("unmeasured")
EVERY = [name for name in LAYER_SEGMENTS if name != "mlp"]
SOME = {
    "all": EVERY,
    "attn": ["attn"],
    "experts": ["moe_experts", "shared_experts"],
    "router": ["moe_router"],
}


@pytest.mark.parametrize("names", SOME.values(), ids=SOME)
def test_gradients_of_compiled_units_are_bitwise_those_without(names, graphs_as_they_are):
    _, expected = kept_without()
    execute = executor(recompute=recompute(offload=names))
    loss, gradients = layer_gradients(execute)
    assert all(map(torch.equal, (loss, *gradients), expected))
    assert graphs_of(execute).offloaded


def test_recomputed_and_stored_segments_of_a_unit_are_bitwise_those_without(graphs_as_they_are):
    _, expected = kept_without()
    execute = executor(recompute=recompute(segments=["attn"], offload=["moe_experts"]))
    loss, gradients = layer_gradients(execute)
    assert all(map(torch.equal, (loss, *gradients), expected))
    assert graphs_of(execute).offloaded and execute.reports[0].recomputed


def loss_and_gradients(model, execute):
    model.zero_grad()
    total = model.loss(*batch(), execute).total
    total.backward()
    return [total, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_each_unit_fetches_the_one_before_it_and_the_newest_stays(compiled, graphs_as_they_are, monkeypatch):
    made, events, start = [], [], Saved.start
    begin = HostActivations.begin
    monkeypatch.setattr(HostActivations, "begin", lambda self: made.append(begin(self)) or made[-1])

    def noted(self):
        before, numbers = bool(self._here), [i for i, each in enumerate(made) if each is self]
        start(self)
        events.append(("fetch" if self._here and not before else "there", *numbers))

    monkeypatch.setattr(Saved, "start", noted)
    model, wanted = model_of("model.num_layers=3"), recompute(offload=["attn"])
    plain = executor() if compiled else run_segments
    expected = loss_and_gradients(model, plain)
    stores = executor(recompute=wanted) if compiled else offloading(run_segments, wanted, HostActivations())
    found = loss_and_gradients(model, stores)
    assert all(map(torch.equal, found, expected))
    last = len(made) - 1
    each = [[("fetch", i), ("there", i)] for i in reversed(range(last))]
    assert events == [("there", last), *(event for pair in each for event in pair)] and last >= 2
    assert not any(each._spans for each in made)  # host memory is free


def test_views_of_one_tensor_are_one_copy_with_its_strides():
    base = torch.randn(6, 4, 10)
    views = [base[:, :, :5], base[:, 1:3, 5:].transpose(0, 1), base.expand(2, 6, 4, 10)]
    host = HostActivations()
    saved = host.store([*views, torch.arange(3)])
    host.begin()
    assert [span.flat.numel() for span in saved._spans] == [240, 3] and not saved._here
    found = saved.take()
    for one, two in zip(found, [*views, torch.arange(3)], strict=True):
        assert torch.equal(one, two) and one.stride() == two.stride()
    assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr() != base.data_ptr()


def test_weights_stay_on_the_device(monkeypatch):
    stored, add = [], Saved.add
    monkeypatch.setattr(Saved, "add", lambda self, tensors: stored.extend(tensors) or add(self, tensors))
    model = model_of("model.num_layers=2")
    loss_and_gradients(model, offloading(run_segments, recompute(offload=EVERY), HostActivations()))
    weights = {weight.data_ptr() for weight in model.parameters()}
    assert stored and not weights & {tensor.data_ptr() for tensor in stored}


def test_the_graph_of_a_segment_holds_none_of_its_tensors():
    host, wanted = HostActivations(), recompute(offload=["attn"])
    segment = Segment("attn", lambda x: (x * 2).sin().exp(), ("x",), ("x",), layer=0)
    values = {"x": (x := torch.ones(5, requires_grad=True) * 3)}
    (result,) = offloading(run_segments, wanted, host)([segment], values, ("x",))
    held, total = weakref.ref(x), result.sum()
    del x, values, result
    host.begin()
    gc.collect()
    assert held() is None and total.grad_fn is not None
    total.backward()


@pytest.mark.usefixtures("as_traced")
@pytest.mark.parametrize("compiled", ["true", "false"])
def test_a_run_of_several_micro_batches_is_bitwise_that_without(compiled, tmp_path):
    words = (f"compile.enabled={compiled}", "train.steps=3", "train.micro_batch_size=2")
    trained = [
        train_in(tmp_path / f"{len(more)}", *words, *more)
        for more in ((), ("recompute.offload=[attn,mlp,moe_router,shared_experts,moe_experts]",))
    ]
    assert numbers(tmp_path / "0") == numbers(tmp_path / "1")
    assert_same_state(*(trainer.optimizer.state_dict() for trainer in trained))


@pytest.mark.parametrize("more", [(), ("parallel.ep=2", "launch.fake_world=2")], ids=["one rank", "ep"])
def test_memory_and_that_of_the_host_are_those_of_a_dry_run(more):
    ranks = 2 if more else 1
    words = (*LARGER, "model.num_layers=6", "recompute.offload=[attn,moe_experts]", *more)
    (memory, *_), found = memory_of(*words, ranks=ranks), dry_run(config(*MODEL, *words))["memory"]
    peak = memory.total - memory.buffers["communication"]
    assert peak == pytest.approx(found["peak_bytes"], rel=0.05)
    assert found["host_bytes"] > 0.2 * sum(memory.by_segment.values())
    plain = dry_run(config(*MODEL, *LARGER, "model.num_layers=6", *more))["memory"]
    assert found["peak_bytes"] < plain["peak_bytes"] - found["host_bytes"] / 2


REFUSED = {
    "recompute.offload=[atn]": "has atn; use attn, mlp",
    "recompute.offload=[attn,attn]": "names attn twice; name each once",
    "recompute.all=true": "leave out recompute.offload=['attn']",
    "recompute.segments=[attn]": "which recompute.segments computes again; name each in one",
    "graph.scope=layer": "which graph.scope=layer captures; use graph.scope=none",
    "graph.scope=full_iteration": "use graph.scope=none, or leave them out",
    "pipeline.ep_overlap=true": "use pipeline.ep_overlap=false, or recompute.offload=",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_stored_is_refused_in_one_line(word):
    words = [] if word.startswith("recompute.offload") else ["recompute.offload=[attn]"]
    with pytest.raises(ConfigError) as refused:
        check(config("compile.enabled=true", *words, word))
    assert REFUSED[word] in str(refused.value)


def test_only_whole_aligned_spans_are_stored():
    storage = torch.arange(100, dtype=torch.float32)
    host = HostActivations()
    saved = host.store([storage[37:60]])
    (span,) = saved._spans
    assert span.start == 32 and span.flat.numel() == 28 and host_activations.ALIGNED == 16
    host.begin()
    assert torch.equal(saved.take()[0], storage[37:60])
