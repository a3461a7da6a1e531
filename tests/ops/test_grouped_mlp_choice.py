"""The choice of the grouped MLP's backends: checks of what is asked, measuring, and remembering."""

import dataclasses
import json
import logging

import pytest
import torch

from graphmoe.config.schema import ConfigError
from graphmoe.ops.grouped_mlp import choice
from graphmoe.ops.grouped_mlp.choice import MlpShape, choose_backends, milliseconds
from graphmoe.ops.timing import WARM_UP_CALLS

SHAPE = MlpShape(T=32, D=16, F=8, E=4, K=2)
FP32 = dataclasses.replace(SHAPE, dtype=torch.float32)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TIMES = {  # as if measured: each direction has another winner
    "torch": (2.0, 4.0, 1.0),
    "triton": (1.0, 3.0, 2.0),
    "te": (3.0, 2.0, 3.0),
    "turbo": (9.0, 9.0, 9.0),
}


class Clock:
    """Stand-in for `milliseconds`; ``asked`` keeps what was measured."""

    def __init__(self, failing=()):
        self.asked, self.failing = [], failing

    def __call__(self, backends, direction, shape, device):
        self.asked += [(backend, direction) for backend in backends]
        number = ("forward", "dgrad", "wgrad").index(direction)
        return {b: self.error(b, direction) or TIMES[b][number] for b in backends}

    def error(self, backend, direction):
        fails = backend in self.failing or (backend, direction) in self.failing
        return RuntimeError("no such kernel") if fails else None


@pytest.fixture
def gpu(monkeypatch):
    """A GPU as far as the choice can tell: (is ROCm, compute capability) -> None."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def make(is_rocm, capability=(9, 0)):
        monkeypatch.setattr(torch.version, "hip", "7.0" if is_rocm else None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    make(False)
    return make


def everything(package):
    return True


def nothing(package):
    return package == "triton"


class Answers(dict):
    """A memory of this process."""

    def recall(self, name, facts):
        return self.get(json.dumps(facts))

    def remember(self, name, facts, answer):
        return self.setdefault(json.dumps(facts), answer)


def choose(requested="auto", shape=SHAPE, device=GPU, memory=None, installed=everything, **rest):
    return choose_backends(requested, shape, device, memory, installed=installed, **rest)


def test_auto_on_a_cpu_is_torch_without_measuring():
    clock = Clock()
    assert choose(device=CPU, measure=clock) == "torch,torch,torch"
    assert clock.asked == []


def test_auto_takes_the_fastest_of_each_direction(gpu):
    assert choose(measure=Clock()) == "triton,te,torch"
    assert choose(measure=Clock(), installed=nothing) == "triton,triton,torch"
    gpu(True)  # torch waits for the host there, and Transformer Engine needs CUDA
    assert choose(measure=Clock()) == "triton,triton,triton"
    assert choose(measure=Clock(), sync_free=False) == "triton,triton,torch"


@pytest.mark.parametrize(
    ("capability", "waits"),
    [((8, 0), True), ((8, 9), True), ((9, 0), False), ((10, 3), False), ((12, 0), True)],
)
def test_torch_waits_for_the_host_where_aten_has_no_grouped_kernel(capability, waits, gpu):
    gpu(False, capability)
    assert choose(measure=Clock()) == ("triton,te,triton" if waits else "triton,te,torch")
    assert choose("torch", sync_free=False) == "torch,torch,torch"
    if waits:
        with pytest.raises(ConfigError, match="torch waits for the host in torch.bfloat16 on this device"):
            choose("torch")


def test_a_backend_that_fails_is_left_out_and_named(gpu, caplog):
    with caplog.at_level(logging.WARNING):
        assert choose(measure=Clock(failing=("triton", ("te", "dgrad")))) == "torch,torch,torch"
    assert "moe.experts=auto leaves out triton for forward: no such kernel" in caplog.text
    assert "te for dgrad" in caplog.text
    with pytest.raises(ConfigError, match="none of torch, triton, te could run the forward"):
        choose(measure=Clock(failing=("torch", "triton", "te")))


def test_an_answer_is_measured_once_and_remembered(gpu):
    first, second, answers = Clock(), Clock(), Answers()
    assert choose(memory=answers, measure=first) == choose(memory=answers, measure=second)
    assert len(first.asked) == 9 and second.asked == []
    (entry,) = answers.values()
    assert entry["milliseconds"]["forward"] == {"torch": 2.0, "triton": 1.0, "te": 3.0}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(MlpShape)])
def test_another_shape_is_another_answer(field, gpu):
    answers = Answers()
    choose(memory=answers, measure=Clock())
    value = torch.float16 if field == "dtype" else getattr(SHAPE, field) + 1
    clock = Clock()
    choose(memory=answers, shape=dataclasses.replace(SHAPE, **{field: value}), measure=clock)
    assert clock.asked
    assert len(answers) == 2


@pytest.mark.parametrize("what", ["device", "torch", "triton", "source", "packages"])
def test_another_device_version_or_source_is_another_answer(what, gpu, monkeypatch):
    answers = Answers()
    choose(memory=answers, measure=Clock())
    changes = {
        "device": (torch.cuda, "get_device_name", lambda device=None: "Another GPU"),
        "torch": (torch, "__version__", "9.9"),
        "triton": (choice, "_triton_version", lambda: "9.9"),
        "source": (choice, "_source_hash", lambda: "0"),
        "packages": (choice, "log", choice.log),
    }
    monkeypatch.setattr(*changes[what])
    clock = Clock()
    choose(memory=answers, measure=clock, installed=nothing if what == "packages" else everything)
    assert clock.asked


@pytest.mark.parametrize("wrong", [{"choice": "triton"}, {"choice": "a,b,c"}, {}, [1], "text", 1])
def test_a_wrong_answer_is_measured_again(wrong, gpu):
    answers = Answers()
    choose(memory=answers, measure=Clock())
    answers.update(dict.fromkeys(answers, wrong))
    clock = Clock()
    assert choose(memory=answers, measure=clock) == "triton,te,torch" and clock.asked


def test_nothing_is_measured_inside_a_capture(gpu, monkeypatch):
    answers = Answers()
    choose(memory=answers, measure=Clock())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose(memory=answers, measure=Clock()) == "triton,te,torch"  # remembered
    with pytest.raises(RuntimeError, match="inside a graph capture"):
        choose(measure=Clock())


def test_a_request_is_taken_as_it_is_without_measuring(gpu):
    clock = Clock()
    assert choose("triton", measure=clock) == "triton,triton,triton"
    assert choose("triton,torch,te", measure=clock) == "triton,torch,te"
    assert choose("torch", device=CPU, measure=clock) == "torch,torch,torch"
    assert clock.asked == []


REFUSED = {  # request: (shape, device, is ROCm, what the error says)
    "fast": (SHAPE, GPU, False, "moe.experts=fast is not known; use one of: auto, torch, triton, te$"),
    "triton,torch": (SHAPE, GPU, False, "is not known"),
    "triton,auto,torch": (SHAPE, GPU, False, "is not known"),
    "triton": (SHAPE, CPU, False, "triton needs a GPU and the device is cpu; use one of: torch"),
    "turbo": (
        SHAPE,
        GPU,
        False,
        "turbo is Primus-Turbo, which needs a ROCm build of torch; use one of: torch",
    ),
    "te": (SHAPE, GPU, True, "te needs CUDA; use one of: triton, turbo"),
    "torch,torch,te": (FP32, GPU, False, "waits for the host in torch.float32"),
    "te,triton,triton": (FP32, GPU, False, "te has bf16 and fp16 kernels only"),
    "torch": (SHAPE, GPU, True, "torch waits for the host in torch.bfloat16 on this device"),
}


@pytest.mark.parametrize("requested", REFUSED)
def test_a_backend_that_cannot_run_is_refused_with_one_that_can(requested, gpu):
    shape, device, is_rocm, message = REFUSED[requested]
    gpu(is_rocm)
    with pytest.raises(ConfigError, match=message):
        choose(requested, shape=shape, device=device)


def test_a_missing_package_is_named(gpu):
    with pytest.raises(ConfigError, match="moe.experts=te needs the package transformer_engine.*pip install"):
        choose("triton,triton,te", installed=nothing)
    with pytest.raises(ConfigError, match="triton needs the package triton"):
        choose("triton", installed=lambda package: False)


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


@pytest.mark.parametrize("direction", ["forward", "dgrad", "wgrad"])
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
