"""The machine of a run: its memory, threads and processes, and the command that it was started by."""

import os
import platform
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from graphmoe.config.schema import ConfigError, HostConfig
from graphmoe.run import machine
from graphmoe.run.machine import check_processes, describe
from graphmoe.runtime.host.signals import ELASTIC, LAUNCHER_PID
from tests.runtime.host.machine import Machine

CPU = torch.device("cpu")
V1 = "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"


@pytest.mark.parametrize(
    ("group", "files", "whole", "free"),
    [
        ("0::/a/b", {"a/memory.max": "1000", "a/memory.current": "900"}, 1000, 100),
        ("0::/a", {"memory.max": "5000", "memory.current": "4000"}, 5000, 1300),
        ("0::/a", {"a/memory.max": "max", "a/memory.current": "10"}, 9000, 9000),
        ("4:cpu,memory:/x", dict(zip(V1, ("7000", "7500"), strict=True)), 7000, 0),
    ],
)
def test_control_groups_bound_the_memory_of_a_cpu(tmp_path, monkeypatch, group, files, whole, free):
    sizes = SimpleNamespace(total=9000, available=9000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: sizes)
    system = Machine(tmp_path, monkeypatch)
    system.write("proc/self/cgroup", f"1:name=systemd:/\n{group}\n")
    system.write("fs/cgroup/memory.stat", "anon 3\ninactive_file 300")
    for path, text in files.items():
        system.write(f"fs/cgroup/{path}", text)
    assert (machine.memory_of(CPU), machine.free_memory_of(CPU)) == (whole, free)


def test_more_threads_or_processes_than_the_machine_can_serve_are_refused(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    check_processes(HostConfig(threads=32), 32)
    threads, many = HostConfig(threads=33), HostConfig()
    for host, nproc, named in ((threads, 1, "host.threads=33"), (many, 33, "launch.nproc=33")):
        with pytest.raises(ConfigError, match=f"{named} is more than 16 for each CPU of .* at most 32"):
            check_processes(host, nproc)


def test_a_gpu_has_its_number_on_the_host(monkeypatch):
    facts = SimpleNamespace(name="NVIDIA H200", uuid="8f3a")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for visible, number in (("4,6", "6"), (None, "1")):
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": visible} if visible else {})
            for device in ("cuda", "cuda:1"):
                place = machine.place_of(torch.device(device))
                assert place == f"{platform.node()}, GPU {number}, NVIDIA H200, UUID 8f3a"
    assert machine.place_of(CPU) == platform.node()


def test_the_command_of_a_worker_is_that_of_its_launcher(monkeypatch):
    def recorded() -> list[str]:
        return describe(CPU)["command"]

    words = [sys.executable, "-c", "input()", "a=1", "host.env.TOKEN=secret"]
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "-m", "graphmoe.train", "a=1"])
    assert recorded() == sys.orig_argv
    with subprocess.Popen(words, stdin=subprocess.PIPE) as launcher:
        while psutil.Process(launcher.pid).cmdline() != words:
            time.sleep(0.01)
        monkeypatch.setenv(LAUNCHER_PID, str(launcher.pid))
        assert recorded() == [*words[:-1], "host.env.TOKEN=***"]
        monkeypatch.delenv(LAUNCHER_PID)
        monkeypatch.setattr(os, "getppid", lambda: launcher.pid)
        assert recorded() == sys.orig_argv
        monkeypatch.setenv(ELASTIC, "of torchrun")
        assert recorded() == sys.orig_argv  # what is between may be a shell with secrets in one word
        monkeypatch.setattr(sys, "orig_argv", ["python", "-u", *words[1:]])
        assert recorded() == [*words[:-1], "host.env.TOKEN=***"]
        launcher.communicate(b"\n")
    assert recorded()[1] == "-u"
