"""Single values that no machine has: each is refused by its key, in the words of its range."""

import dataclasses
import math
import time

import pytest

from graphmoe.config.ranges import BELOW_ONE, FP32, NOT_NEGATIVE, POSITIVE, SHARE, AtMost, Range, fields_of
from graphmoe.config.schema import ConfigError, RunConfig
from graphmoe.plan.rules import check, violations

FIELDS = [*fields_of(RunConfig())]
OUTSIDE = {POSITIVE: (0, -1), NOT_NEGATIVE: (-1,), BELOW_ONE: (-0.1, 1.0), SHARE: (-0.1, 1.1)}


def changed(**sections: dict) -> RunConfig:
    found = RunConfig()
    for section, values in sections.items():
        setattr(found, section, dataclasses.replace(getattr(found, section), **values))
    return found


def said_of(key: str, value: object) -> list[str]:
    section, name = key.split(".")
    return violations(changed(**{section: {name: value}}))


def test_every_number_of_the_schema_has_a_range_or_a_rule():
    numbers = {f.key for f in FIELDS if f.hint in (int, float, int | None, float | None)}
    ranged = {f.key for f in FIELDS if any(isinstance(mark, Range) for mark in f.marks)}
    ruled = {"model.num_kv_heads", "model.yarn_factor", "model.yarn_beta_fast"}
    ruled |= {"model.llama3_factor", "model.llama3_high_freq_factor"}
    ruled |= {"data.bpe_vocab_size", "launch.fake_rank"}
    assert numbers == ranged | ruled | {"data.seed", "train.seed"}


def test_a_value_out_of_its_range_is_named_with_the_range():
    of_several_rules = {
        "model.vocab_size",
        "model.num_layers",
        "model.qk_rope_head_dim",
        "data.document_length",
    }
    ranges = [(f.key, mark) for f in FIELDS for mark in f.marks if isinstance(mark, Range)]
    for key, bad, wanted in [(key, bad, mark.wanted) for key, mark in ranges for bad in OUTSIDE[mark]]:
        first, *others = said_of(key, bad)
        assert first == f"{key}={bad} must be {wanted}" and (not others or key in of_several_rules), others
    for bad in (math.nan, math.inf):
        assert f"optim.lr={bad} must be finite and greater than 0" in said_of("optim.lr", bad)


@pytest.mark.parametrize("fraction", [math.nan, math.inf, -0.5, 1.5, 1e299])
def test_a_rotary_fraction_out_of_range_is_named(fraction):
    model = {"attention": "gqa", "rotary_fraction": fraction, "head_dim": 2**31 - 2}
    first, *_ = violations(changed(model=model))
    assert first.startswith(f"model.rotary_fraction={fraction} must be ") and "between 0 and 1" in first


def test_numbers_below_1_that_others_must_divide_are_named():
    for model, line in (
        (
            {"attention": "gqa", "num_heads": -1, "num_kv_heads": 2},
            "model.num_heads=-1 must be greater than 0",
        ),
        ({"top_k": -1, "num_groups": 4, "topk_groups": 2}, "model.top_k=-1 must be greater than 0"),
    ):
        assert violations(changed(model=model))[0] == line


def test_a_number_that_fp32_cannot_hold_is_refused():
    held = [f for f in FIELDS if FP32 in f.marks]
    cases = [(f, bad, why) for f in held for bad, why in ((1e-46, "too small"), (1e300, "infinite"))]
    cases += [(f, 0.99999999, "1 in fp32; use at most 0.99999994") for f in held if BELOW_ONE in f.marks]
    for f, bad, why in cases:
        found = [line for line in said_of(f.key, bad) if line.startswith(f"{f.key}={bad} ")]
        in_range = not {SHARE, BELOW_ONE} & {*f.marks} or bad < 1
        assert any(f"{f.key}={bad} is {why}" in line for line in found), (f.key, bad)
        assert len(found) == 1 or not in_range, (f.key, bad)


def test_half_a_character_is_refused_wherever_it_stands():
    for key, value in (
        ("log.wandb_project", "a\ud800"),
        ("host.env", {"A": "\udfff"}),
        ("host.env", {"\ud800": "a"}),
        ("data.val_paths", ["a", "\ud800"]),
    ):
        (found,) = said_of(key, value)
        assert found.startswith(f"{key}=") and "has half a character" in found
        found.encode()


def test_a_number_that_takes_hours_or_all_memory_before_a_run_begins_is_refused():
    started = time.monotonic()
    limits = {f.key: mark.limit for f in FIELDS for mark in f.marks if isinstance(mark, AtMost)}
    assert len(limits) > 30
    for key, limit in limits.items():
        for value in (limit + 1, 10**9 + limit, 2**63 - 1):
            assert said_of(key, value) == [f"{key}={value} is too large; use at most {limit}"]
        wide = [f"{key}=1000000000...(401 digits) needs more than 64 bits; use at most {limit}"]
        assert said_of(key, 10**400) == wide
        said_of(key, limit)
    assert time.monotonic() - started < 60


def test_all_violations_are_reported_together():
    broken = changed(
        model={"num_experts": -1, "num_heads": 0, "attention": "gqa", "num_kv_heads": 0},
        train={"steps": 0, "micro_batch_size": 3},
        optim={"lr": -1.0},
        data={"seq_len": -4},
    )
    with pytest.raises(ConfigError) as error:
        check(broken)
    lines = str(error.value).splitlines()
    assert lines[0].startswith("model.num_heads=0 must be")
    assert all(line.startswith("  ") for line in lines[1:])
    wanted = "model.num_experts=-1 model.num_heads=0 train.steps=0 optim.lr=-1.0 data.seq_len=-4"
    for key in [*wanted.split(), "train.global_batch_size=16"]:
        assert any(key in line for line in lines), key
