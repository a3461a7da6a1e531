"""The choice of the grouped MLP's backends: checks of what is asked, measuring, and remembering."""

import dataclasses
import json
import logging
from unittest import mock

import pytest
import torch

from graphmoe.config import packages
from graphmoe.config.schema import ConfigError
from graphmoe.ops.grouped_mlp import DIRECTIONS, choice
from graphmoe.ops.grouped_mlp.choice import MlpShape, choose_backends, milliseconds
from graphmoe.ops.timing import WARM_UP_CALLS

SHAPE = MlpShape(T=32, D=16, F=8, E=4, K=2)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TIMES = {  # as if measured: each direction has another winner
    "torch": (2.0, 4.0, 1.0),
    "triton": (1.0, 3.0, 2.0),
    "te": (3.0, 2.0, 3.0),
    "turbo": (9.0, 9.0, 9.0),
}
FASTEST = "triton,te,torch"
ALL = ("triton", "primus_turbo", "transformer_engine")


class Clock:
    """Stand-in for `milliseconds`; ``asked`` keeps what was measured."""

    def __init__(self, failing=()):
        self.asked, self.failing = [], failing

    def __call__(self, backends, direction, shape, device):
        self.asked += [(backend, direction) for backend in backends]
        return {b: self.error(b, direction) or TIMES[b][DIRECTIONS.index(direction)] for b in backends}

    def error(self, backend, direction):
        fails = backend in self.failing or (backend, direction) in self.failing
        return RuntimeError("no such kernel") if fails else None


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """A GPU as far as the choice can tell; call it for another one, or with other packages."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def make(is_rocm=False, capability=(9, 0), installed=ALL, name="Some GPU"):
        monkeypatch.setattr(torch.version, "hip", "7.0" if is_rocm else None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(packages, "is_installed", lambda package: package in installed)

    make()
    return make


class Answers(dict):
    """A memory of this process."""

    def recall(self, name, facts):
        return self.get(json.dumps(facts))

    def remember(self, name, facts, answer):
        return self.setdefault(json.dumps(facts), answer)


def choose(requested="auto", shape=SHAPE, device=GPU, memory=None, measure=milliseconds, **rest):
    with mock.patch.object(choice, "milliseconds", measure):
        return choose_backends(requested, shape, device, memory, **rest)


def measured(**rest):
    clock = Clock()
    return choose(measure=clock, **rest), clock.asked


def test_auto_takes_the_fastest_of_each_direction(gpu, monkeypatch):
    assert measured()[0] == FASTEST
    assert measured(device=CPU) == ("torch,torch,torch", [])
    gpu(installed=ALL[:1])
    assert measured()[0] == "triton,triton,torch"
    gpu(is_rocm=True)  # torch waits for the host there, and Transformer Engine needs CUDA
    assert measured()[0] == "triton,triton,triton"
    assert measured(sync_free=False)[0] == "triton,triton,torch"
    monkeypatch.setattr(packages, "amd_gpus", lambda: {"gfx950"})
    for version, times in (("0.7.0", True), ("0.6.1", False)):
        monkeypatch.setattr(packages, "version_of", lambda name, version=version: version)
        assert (("turbo", "forward") in measured()[1]) is times


@pytest.mark.parametrize(
    ("capability", "waits", "is_rocm"),
    [((8, 0), True, False), ((8, 9), True, False), ((9, 0), False, False), ((10, 3), False, False)]
    + [((12, 0), True, False), ((9, 4), True, True), ((9, 5), True, True)],  # on ROCm gfx942 and gfx950
)
def test_torch_waits_for_the_host_where_aten_has_no_grouped_kernel(capability, waits, is_rocm, gpu):
    gpu(is_rocm, capability)
    expected = "triton,triton,triton" if is_rocm else "triton,te,triton"
    assert measured()[0] == (expected if waits else FASTEST)
    assert choose("torch", sync_free=False) == "torch,torch,torch"
    if waits:
        with pytest.raises(ConfigError, match="torch waits for the host in torch.bfloat16 on this device"):
            choose("torch")


def test_a_backend_that_fails_is_left_out_and_named(caplog):
    with caplog.at_level(logging.WARNING):
        assert choose(measure=Clock(failing=("triton", ("te", "dgrad")))) == "torch,torch,torch"
    assert "moe.experts=auto leaves out triton for forward, as it failed: no such kernel" in caplog.text
    assert "te for dgrad" in caplog.text
    with pytest.raises(ConfigError, match="none of torch, triton, te could run the forward"):
        choose(measure=Clock(failing=("torch", "triton", "te")))


def test_an_answer_is_measured_once_for_each_shape_device_version_and_source(gpu, monkeypatch):
    answers = Answers()
    assert len(measured(memory=answers)[1]) == 9 and measured(memory=answers) == (FASTEST, [])
    (entry,) = answers.values()
    assert entry["milliseconds"]["forward"] == {"torch": 2.0, "triton": 1.0, "te": 3.0}
    for field in dataclasses.fields(MlpShape):
        value = torch.float16 if field.name == "dtype" else getattr(SHAPE, field.name) + 1
        assert measured(memory=answers, shape=dataclasses.replace(SHAPE, **{field.name: value}))[1], field
    for change in ({"name": "Another GPU"}, {"installed": ALL[:1]}):
        gpu(**change)
        assert measured(memory=answers)[1], change
    gpu()
    for holder, name, value in (
        (torch, "__version__", "9.9"),
        (choice, "triton_version", lambda: "9.9"),
        (choice, "_source_hash", lambda: "0"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, value)
            assert measured(memory=answers)[1], name
    assert measured(memory=answers)[1] == []


@pytest.mark.parametrize("wrong", [{"choice": "triton"}, {"choice": "a,b,c"}, {}, [1], "text", 1])
def test_a_wrong_answer_is_measured_again(wrong):
    answers = Answers()
    measured(memory=answers)
    answers.update(dict.fromkeys(answers, wrong))
    found, asked = measured(memory=answers)
    assert found == FASTEST and asked


def test_nothing_is_measured_inside_a_capture(monkeypatch):
    answers = Answers()
    measured(memory=answers)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert measured(memory=answers) == (FASTEST, [])
    with pytest.raises(RuntimeError, match="inside a graph capture"):
        measured()


def test_a_request_is_taken_as_it_is_without_measuring():
    assert measured(requested="triton") == ("triton,triton,triton", [])
    assert measured(requested="triton,torch,te") == ("triton,torch,te", [])
    assert measured(requested="torch", device=CPU) == ("torch,torch,torch", [])


FP32 = {"shape": dataclasses.replace(SHAPE, dtype=torch.float32)}
ROCM = {"is_rocm": True}
REFUSED = [  # request, where, the GPU, what the error says
    ("fast", {}, {}, "moe.experts=fast is not known; use one of: auto, torch, triton, te$"),
    ("triton,torch", {}, {}, "is not known"),
    ("triton,auto,torch", {}, {}, "is not known"),
    ("triton", {"device": CPU}, {}, "triton needs a GPU and the device is cpu; use one of: torch"),
    ("turbo", {}, {}, "turbo is Primus-Turbo, which needs a ROCm build of torch; use one of: torch"),
    ("te", {}, ROCM, "te needs CUDA; use one of: triton, turbo"),
    ("torch,torch,te", FP32, {}, "waits for the host in torch.float32"),
    ("te,triton,triton", FP32, {}, "te has bf16 and fp16 kernels only"),
    ("torch", {}, ROCM, "torch waits for the host in torch.bfloat16 on this device"),
    (
        *("triton,triton,te", {}, {"installed": ALL[:1]}),
        "moe.experts=te needs the package transformer_engine.*pip install",
    ),
    ("triton", {}, {"installed": ()}, "triton needs the package triton"),
]


@pytest.mark.parametrize(("requested", "where", "machine", "message"), REFUSED)
def test_a_backend_that_cannot_run_is_refused_with_one_that_can(requested, where, machine, message, gpu):
    gpu(**machine)
    with pytest.raises(ConfigError, match=message):
        choose(requested, **where)


@pytest.mark.parametrize("good_calls", [0, WARM_UP_CALLS + 2])
def test_backends_are_measured_in_turns_and_one_that_fails_at_any_call_is_told(monkeypatch, good_calls):
    asked, call = [], choice.call_op

    def run(direction, *arguments):
        asked.append(arguments[-1])
        if arguments[-1] == "te" and asked.count("te") > good_calls:
            raise RuntimeError("no such kernel")
        return call(direction, *arguments[:-1], "torch")

    monkeypatch.setattr(choice, "call_op", run)
    found = milliseconds(["torch", "te", "triton"], "forward", SHAPE, CPU)
    assert found["torch"] > 0 and found["triton"] > 0 and str(found["te"]) == "no such kernel"
    assert found["te"].__traceback__ is None
    rounds = [*zip(asked[-8::2], asked[-7::2], strict=True)]
    assert all(set(names) == {"torch", "triton"} for names in rounds)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_measuring_runs_the_op_on_a_routing_over_all_experts(direction, monkeypatch):
    seen, call = [], choice.call_op
    monkeypatch.setattr(choice, "call_op", lambda *given: seen.append(given) or call(*given))
    found = milliseconds(["torch"], direction, SHAPE, CPU)
    assert found.keys() == {"torch"} and found["torch"] > 0
    assert len(seen) == WARM_UP_CALLS + choice.REPEATS
    asked, *given = seen[0]
    assert asked == ("wgrad_into" if direction == "wgrad" else direction)
    if direction == "wgrad":
        *given, of_gate_up, of_down, backend, add = given
        assert of_gate_up.dtype == of_down.dtype == torch.float32 and not add
    else:
        *given, backend = given
    assert backend == "torch"
    counts_E = torch.diff(given[-1], prepend=torch.zeros(1, dtype=torch.int32))
    assert int(counts_E.min()) > 0 and int(counts_E.max()) > int(counts_E.min())
    assert int(counts_E.sum()) == SHAPE.T * SHAPE.K
