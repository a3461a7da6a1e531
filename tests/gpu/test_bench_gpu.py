"""The benchmark tool on a GPU."""

from graphmoe.bench import BenchArgs, ShapeChoice
from graphmoe.bench import __main__ as bench
from graphmoe.bench.ops_suite import ops_suite
from tests.bench.test_bench import CPU, FLOORS


def test_every_case_runs_on_a_gpu_at_tiny_shapes():
    args = BenchArgs(shapes=ShapeChoice.tiny, repeats=3)
    rows = bench.bench(args)["rows"]
    names = {case.name for case in ops_suite(False, CPU)[0]}
    assert {row["case"] for row in rows} == names > FLOORS.keys()
    assert [(row["case"], row["alternative"], row["error"]) for row in rows if row["error"]] == []
    steps = [row for row in rows if row["case"].endswith("/forward_backward")]
    kept = {(row["case"], row["alternative"]): row["memory_bytes"] for row in steps}
    assert kept and {key: count for key, count in kept.items() if not count or count < 0} == {}
    assert sum(row["alternative"].startswith("auto=") for row in rows) == 6  # three shapes, two routings


def test_a_ladder_of_one_gpu_has_gains_and_slow_steps(tmp_path):
    words = ["suite=ladder", "shapes=tiny", "nproc=1", "repeats=5", "passes=2"]
    words += ["only=baseline,loss_fusion,full_iteration,host_tuning", f"out={tmp_path / 'ladder.json'}"]
    document = bench.bench(bench.parse_args(BenchArgs, words, prog="graphmoe.bench"), words)
    assert [line.partition(":")[0] for line in document["left_out"]] == ["symm", "replicas", "ep_overlap"]
    rows = {row["rung"]: row for row in document["rows"]}
    assert [row["error"] for row in rows.values()] == [None] * 4
    for name, row in rows.items():
        assert [job["pass"] for job in row["jobs"]] == [1, 2] and row["peak_gib"] > 0
        assert ("p99_over_p50" in row) == (name in ("full_iteration", "host_tuning"))
        assert row["gain"].count("%") in ((0,) if name == "baseline" else (2, 3))


def test_steps_are_timed_on_a_gpu_with_idle_time_memory_and_kernels():
    words = ["suite=step", "shapes=tiny", "overrides=compile=none", "scopes=none,full_iteration"]
    args = bench.parse_args(BenchArgs, [*words, "repeats=5"], prog="graphmoe.bench")
    plain, captured, again = bench.bench(args, words)["rows"]
    for row in (plain, captured, again):
        assert row["error"] is None, row
        assert 0 <= row["idle_share"] < 1 and row["host_ms"] > 0
        assert row["device_gib"] >= row["peak_gib"] > 0
        assert len(row["kernels"]) == 10 and all(kernel["ms"] > 0 for kernel in row["kernels"])
    assert (captured["graphs"], plain["graphs"], again["again"]) == (1, None, True)
    assert captured["pool_bytes"] > 0 and captured["host_ms"] < plain["host_ms"]
