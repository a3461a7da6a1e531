"""The doctor's probes of a GPU."""

import torch

from graphmoe.doctor import machine


def test_a_gpu_captures_and_replays_a_graph():
    assert machine.probe_graphs() == "captured and replayed"
    assert len(machine.devices()) == torch.cuda.device_count() > 0
