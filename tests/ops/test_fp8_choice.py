"""The choice of products in 8 bits: what is timed, the speed that follows, and remembering."""

import json
import logging
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from graphmoe.config.schema import ConfigError
from graphmoe.ops import fp8_choice
from graphmoe.ops.fp8_choice import FORMS, Dense, Experts, slower, speeds, to_text
from graphmoe.ops.grouped_mlp.choice import MlpShape
from tests.ops.seen_ops import SeenOps
from tests.ops.test_grouped_mlp_choice import Answers

CPU = torch.device("cpu")
DENSE = Dense(R=24, N=32, K=16, wgrad="fp8")
EXPERTS = Experts(MlpShape(T=32, D=32, F=16, E=4, K=2), "torch,torch,torch")


@pytest.fixture
def timer(monkeypatch):
    """Times of the forms in turn, each of which runs; the attribute ``runs`` counts products timed."""

    def times(calls, rounds, device):
        times.runs += 1
        for call in calls.values():
            call()
        return {name: [ms, 100.0, ms] for name, ms in zip(calls, times.ms, strict=True)}

    times.runs, times.ms = 0, (10.0, 8.0, 4.0)
    monkeypatch.setattr(fp8_choice, "time_in_turns", times)
    return times


def test_the_storing_of_weights_is_shared_by_the_micro_batches_of_a_step(timer):
    assert speeds({"one": DENSE}, 1, CPU, None) == {"one": 10 / 12}
    assert speeds({"one": DENSE, "experts": EXPERTS}, 4, CPU, None) == {"one": 10 / 9, "experts": 10 / 9}


def test_a_product_that_gains_less_than_two_percent_stays_in_bf16():
    found = {"experts": 1.2, "attn 32x16": 0.911, "mlp 64x16": 1.019, "mlp 16x32": 1.021}
    assert slower(found) == ["attn 32x16", "mlp 64x16"]
    assert to_text(found) == "fp8 in 2 of 4 products; bf16 for: attn 32x16 (0.91x), mlp 64x16 (1.02x)"
    assert to_text({"experts": 1.2}) == "fp8 in 1 of 1 products"


def test_times_are_taken_once_for_each_product_and_remembered(timer, caplog):
    answers = Answers()
    with caplog.at_level(logging.INFO):
        first = speeds({"one": DENSE}, 2, CPU, answers)
    timed = "precision.fp8_measure=auto timed one: plain 10.000 ms, fp8 8.000 ms, weights 4.000 ms"
    assert timed in caplog.text
    timer.ms = (1.0, 9.0, 9.0)
    assert speeds({"other": DENSE}, 2, CPU, answers) == {"other": first["one"]} and timer.runs == 1
    assert speeds({"one": DENSE}, 1, CPU, answers) == {"one": 10 / 12} and timer.runs == 1
    others = (replace(DENSE, R=8), replace(DENSE, N=48), replace(DENSE, wgrad="bf16"))
    for number, each in enumerate((*others, replace(DENSE, dtype=torch.float32), EXPERTS), 2):
        speeds({"one": each}, 2, CPU, answers)
        assert timer.runs == number, each
    for wrong in ({"plain": 1.0}, [1], "text", dict.fromkeys(FORMS, 0.0), dict.fromkeys(FORMS, "1")):
        answers.update(dict.fromkeys(answers, wrong))
        timer.runs = 0
        speeds({"one": DENSE}, 2, CPU, answers)
        assert timer.runs == 1, wrong
    json.dumps(answers)  # plain values, as a cache keeps them


def test_too_little_memory_to_time_a_product_is_told_in_one_line(monkeypatch):
    fail = Mock(side_effect=torch.OutOfMemoryError("9 GiB"))
    monkeypatch.setattr(fp8_choice, "time_in_turns", fail)
    message = r"no memory to time attn 32x16 \(9 GiB\); use precision.fp8_measure=none"
    with pytest.raises(ConfigError, match=message):
        speeds({"attn 32x16": DENSE}, 1, CPU, None)


GIVEN, STORED = ["fp8_rows"] * 2, ["fp8_rows", "fp8_columns"]
OF_EXPERTS = ["fp8_rows", "fp8_mlp_forward", "fp8_rows", "fp8_mlp_dgrad", "fp8_mlp_wgrad_into"]
PLAIN = ["grouped_mlp", "grouped_mlp_dgrad", "grouped_mlp_wgrad_into"]
IN_MXFP8 = replace(EXPERTS, recipe="mxfp8", shape=replace(EXPERTS.shape, F=32))
RUN = {  # product, operations of the plain form, of that in 8 bits, and of the storing of weights
    "dense": (DENSE, [], [*GIVEN, *["fp8_transposed"] * 2], STORED),
    "wgrad in bf16": (replace(DENSE, wgrad="bf16", R=20), [], GIVEN, STORED),
    "experts": (EXPERTS, PLAIN, OF_EXPERTS, STORED * 2),
    "experts in mxfp8": (
        *(IN_MXFP8, PLAIN, [name.replace("fp8_rows", "mx_rows") for name in OF_EXPERTS]),
        ["mx_rows", "mx_columns"] * 2,
    ),
}


@pytest.mark.parametrize(("product", "plain", "in_fp8", "weights"), RUN.values(), ids=[*RUN])
def test_a_form_runs_the_operations_of_forward_and_gradients(product, plain, in_fp8, weights):
    calls = product.calls(CPU)
    assert tuple(calls) == FORMS
    for form, wanted in zip(FORMS, (plain, in_fp8, weights), strict=True):
        with SeenOps() as seen:
            calls[form]()
        names = [name.removeprefix("graphmoe::") for name in seen.names]
        assert [name for name in names if name not in ("unpermute", "permute")] == wanted, form
    assert speeds({"one": product}, 1, CPU, None)["one"] > 0  # by the clock
