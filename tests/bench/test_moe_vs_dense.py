"""benchmarks/moe_vs_dense.py: tiny models end to end, and its arithmetic on a power law."""

import json

import pytest

from benchmarks import moe_vs_dense as versus
from tests.runs import ROOT, refusal


@pytest.mark.slow
def test_tiny_models_are_compared_and_a_later_call_goes_on(tmp_path, capsys):
    out, words = tmp_path / "versus.json", "sizes=tiny length=0.5 rates=3e-3 overrides=compile=none"
    words = [f"{tmp_path}", f"{out}", f"texts={ROOT / 'graphmoe'}", "device=cpu", *words.split()]
    versus.main([*words, "format=json"])
    document = json.loads(out.read_text())
    assert document == json.loads(capsys.readouterr().out) and str(tmp_path) not in out.read_text()
    (row,), runs = document["results"], document["runs"]
    assert [run["key"][1:3] for run in runs] == [["moe", 15], ["dense", 15], ["dense", 24]]
    assert (row["active"], row["moe_in_all"]) == (2 * (65_536 + 147_456), 2 * (65_536 + 4 * 147_456 + 1024))
    assert row["dense_loss_at_equal_tokens"] == pytest.approx(runs[1]["loss"]) and runs[1]["loss"] < 5.9
    out.write_text(json.dumps(document | {"runs": runs[:2]}))
    versus.main([*words, "minutes=0.001"])
    assert "for lack of minutes: tiny dense, 24 steps" in capsys.readouterr().out
    assert "another settings; use a new file" in refusal(versus.main, capsys, *words, "overrides=run.name=a")


def test_ratios_are_those_of_a_power_law():
    def run(tokens, loss, ns, flops=2.0, router=0):
        counts = {"active": {"body": 7 + router, "router": router}, "total": {"body": 28}}
        row = {"tokens": tokens, "loss": loss, "seconds": tokens * ns * 1e-9, "flops_per_token": flops}
        return row | {"key": ["", "", 0, 1e-3], "parameters": counts}

    dense = [run(1e6 * x, 10 * x**-0.1, 20) for x in (1.6, 1.0)]
    row = versus.compared(run(1e6, 10 * 1.3**-0.1, 30, 2.5, 1), dense)
    assert row.pop("within_dense_runs") == {"loss": True, "seconds": True} and row.pop("rates")
    wanted = {"gain_per_token": 1.3, "gain_per_flop": 1.04, "tax": 1.5, "speedup": 1.3 / 1.5}
    assert row == pytest.approx(row | wanted | {"dense_loss_at_equal_time": 10 * 1.5**-0.1})
    assert versus.on_power_law([(1, 1), (2, 4), (4, 32)], 8) == pytest.approx(256)
    assert versus.seconds_at([100, *[9] * 6, 1, 2, 3])[-4:] == [14, 15, 17, 20]
