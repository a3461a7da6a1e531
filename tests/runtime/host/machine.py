"""A machine for tests: files of a system, and GPUs with a place on its bus."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from graphmoe.runtime.host import tuning


class Machine:
    """Stand-in for the files below /sys, for torch's view of GPUs, and for the CPUs of this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.allowed, self.num_threads = folder, set(range(8)), 8
        self.first_shown = 0  # GPU that the process sees as its first
        monkeypatch.setattr(tuning, "SYS", folder)
        monkeypatch.setattr(tuning, "PROC", folder / "proc")
        self.write("proc/self/cgroup", "0::/\n")
        monkeypatch.setattr(tuning, "cpus_here", lambda: self.allowed)
        monkeypatch.setattr(torch.cuda, "get_device_properties", self._properties)

    def write(self, path: str, text: str) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text)

    def has_nodes(self, cpus_of_node: dict[int, str]) -> None:
        self.write("devices/system/node/has_cpu", ",".join(map(str, cpus_of_node)) + "\n")
        for node, cpus in cpus_of_node.items():
            self.write(f"devices/system/node/node{node}/cpulist", f"{cpus}\n")

    def has_gpus(self, node_of_gpu: dict[int, int]) -> None:
        for gpu, node in node_of_gpu.items():
            self.write(f"bus/pci/devices/0000:{0xA0 + gpu:02x}:00.0/numa_node", f"{node}\n")

    def _properties(self, device: torch.device) -> SimpleNamespace:
        bus = 0xA0 + self.first_shown + device.index
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)
