"""The doctor's probes of a GPU."""

import torch

from graphmoe import doctor


def test_a_gpu_captures_and_replays_a_graph():
    assert doctor.probe_graphs() == "captured and replayed"
    assert len(doctor.devices()) == torch.cuda.device_count() > 0
