"""The benchmark tool on a GPU."""

from __future__ import annotations

from graphmoe import bench
from tests.test_bench import NAMES


def test_every_case_runs_on_a_gpu_at_tiny_shapes():
    args = bench.BenchArgs(shapes=bench.ShapeChoice.tiny, repeats=3, peers=False)
    rows = bench.bench(args)["rows"]
    assert {row["case"] for row in rows} == NAMES
    assert [(row["case"], row["alternative"], row["error"]) for row in rows if row["error"]] == []
    kept = [row["memory_bytes"] for row in rows if row["case"].endswith("/forward_backward")]
    assert kept and all(isinstance(count, int) and count > 0 for count in kept)
    assert sum(row["alternative"].startswith("auto=") for row in rows) == 6  # three shapes, two routings
