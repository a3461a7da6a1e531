"""Fifty compiled steps in fp32 are those of transformers with torch's AdamW: benchmarks/referee.py, small."""

import json

import pytest

from benchmarks import referee


@pytest.mark.parametrize("model", referee.Model)
def test_each_loss_is_that_of_transformers(tmp_path, model, capsys):
    referee.main(f"{model} {tmp_path / 'new'} size=tiny dtype=fp32 steps=50 device=cpu format=json".split())
    ours, theirs = map(json.loads(capsys.readouterr().out).get, ("graphmoe", "transformers"))
    for key, limit in {"loss": 1e-5, "grad_norm": 1e-4, "lr": 1e-5}.items():
        assert ours[key] == pytest.approx(theirs[key], rel=limit, abs=0) and len(ours[key]) == 50, key
    assert ours["loss"][-1] < ours["loss"][0] - 0.5


@pytest.mark.parametrize("off, agree", [(0, ["bf16", "fp32"]), (3e-5, ["bf16"]), (3e-3, []), (1e999, [])])
def test_losses_beyond_their_limit_do_not_agree(off, agree):
    ours, theirs = ({"loss": [2.0] * 50 + [2.0 + 2 * each] * 100} for each in (off, 0))
    assert [d.name for d in referee.LIMITS if referee.verdict(ours, theirs, d)["agrees"]] == agree
