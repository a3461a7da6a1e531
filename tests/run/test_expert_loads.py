"""Experts that get nothing or nearly all: when they are warned of, and the bar of a line."""

from graphmoe.run.expert_loads import ASCII, LoadWatch, load_bar, summary_of, watch_rows

EVEN = [1.0] * 8
ONE_DEAD = [0.0, *[8 / 7] * 7]
FULL = [4.0, *[4 / 7] * 7]


def rows(*loads: list[float], steps: int = 10) -> list[dict]:
    return [{"step": steps * n, "steps": steps, "load": [each, EVEN]} for n, each in enumerate(loads, 1)]


def test_an_expert_is_warned_of_while_it_stays_dead_or_overfull_and_not_for_one_window():
    assert not watch_rows(rows(EVEN, ONE_DEAD, EVEN, FULL, EVEN, ONE_DEAD), top_k=2)
    seen = watch_rows(rows(ONE_DEAD, ONE_DEAD, ONE_DEAD, EVEN), top_k=2)
    assert [(each.first, each.last, each.dead) for each in seen] == [(11, 20, [(0, 0)]), (21, 30, [(0, 0)])]
    assert str(seen[0]).startswith("steps 11 to 20: 1 of 16 experts get no tokens (MoE layer 0: 0); a larger")
    (full,) = watch_rows(rows(FULL, FULL), top_k=2)
    assert "1 of 16 get up to 4.0 times the mean, at most 4.0 (MoE layer 0: 0)" in str(full)
    assert not watch_rows(rows(FULL, FULL), top_k=1), "half of all tokens are not too many"


def test_a_window_has_ten_steps_however_often_they_are_read():
    watch = LoadWatch(top_k=2)
    found = [watch.add(step, 1, [ONE_DEAD]) for step in range(1, 31)]
    assert [each.last for each in found if each] == [20, 30]


def test_a_summary_counts_experts_at_the_end_and_steps_with_any():
    for loads, expected in (
        ((), (0, 0, 0)),
        ((EVEN,), (0, 0, 0)),
        ((FULL, FULL), (0, 1, 10)),
        ((ONE_DEAD, ONE_DEAD, EVEN), (0, 0, 10)),
    ):
        assert tuple(summary_of(rows(*loads), top_k=2).values()) == expected


def test_a_bar_has_a_glyph_for_each_expert_or_each_few():
    assert load_bar([0.0, 0.1, 1.0, 2.0, 4.0], ASCII) == "0.=##"
    assert len(load_bar([1.0] * 256)) == 16
