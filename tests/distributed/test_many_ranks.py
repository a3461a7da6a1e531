"""What many ranks send to rank 0 and its store: no count grows faster than n log n."""

import json
import math
import os
from pathlib import Path

import pytest

from benchmarks import thousand_ranks
from graphmoe.checkpoint.saver import Saver
from tests.forked import FORKS

SIZES = (16, 40)
ELASTIC = "launchers"  # torch elastic's nodes all rewrite one entry, which has a part for each


def measure(path: Path) -> None:
    os.environ |= thousand_ranks.ENVIRONMENT
    stages = thousand_ranks.measured(SIZES)
    faster = thousand_ranks.faster_than_n_log_n({n: of for n, of in stages.items() if n != ELASTIC})
    path.write_text(json.dumps([faster, stages]))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "found.json"
    process = FORKS.Process(target=measure, args=(path,), daemon=True)
    process.start()
    process.join(240)
    assert process.exitcode == 0
    return json.loads(path.read_text())


@pytest.mark.slow
def test_no_count_on_rank_0_or_its_store_exceeds_n_log_n(found):
    faster, stages = found
    assert faster == [] and {"rendezvous", "mesh of gloo groups", "save", "resume", ELASTIC} <= stages.keys()
    operations = [stages["rendezvous"][str(size)]["store_operations"] for size in SIZES]
    assert 3 * SIZES[1] < operations[1] < 4 * operations[0]  # counted at all, and not 6 times as many
    for stage in ("rendezvous", "save", "resume"):
        assert 2 <= stages[stage]["40"]["connections_of_a_rank"] <= 2 * math.log2(40)


def test_a_quadratic_count_is_named():
    first, *others = thousand_ranks.COUNTS
    grown = {n: {**dict.fromkeys(others, n * math.log(n)), first: n * n} for n in SIZES}
    (line,) = thousand_ranks.faster_than_n_log_n({"mesh": grown})
    assert line.startswith(f"mesh: {first}: 256 on 16 ranks, 1600 on 40")


def test_a_process_with_over_a_thousand_files_saves(tmp_path):
    path, held = tmp_path / "saved", [os.memfd_create("tensors") for _ in range(1024)]
    try:
        saver = Saver(held[-1])
        assert saver.write(path, [b"one", b"two"])[1] == path.stat().st_size == 6
        saver.close()
    finally:
        for descriptor in held:
            os.close(descriptor)
