"""The tuning command on a GPU: walls from traces, proposals of the projection, graphs against the host."""

import json

from graphmoe import tune


def test_a_tiny_model_waits_for_the_host_until_it_is_captured(tmp_path):
    words = ["model=tiny", "data.seq_len=256", "compile=none", "run.device=cuda", "hardware=h200"]
    tune.main([*words, "train.micro_batch_size=4", "minutes=3", "top=1", f"out={tmp_path}"])
    document = json.loads((tmp_path / "tune.json").read_text())
    first, *others = document["rows"]
    assert first["error"] is None and first["wall"] == "host" and "launches" in first["why_wall"]
    assert first["projected_gb"] > 0 and 0 < first["gib"] < 140
    captured = [row for row in others if row["changes"].get("graph.scope") == "full_iteration"]
    assert captured and captured[0]["gain"] > 0.05
    assert "graph.scope=full_iteration" in document["winner"]
