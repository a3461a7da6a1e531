"""Readers of files that strangers may have made, on 10,000 mutations: a value or an error, soon."""

import json
import random
import resource
import time

import psutil
import pytest
import torch

from graphmoe.checkpoint import CheckpointError
from graphmoe.checkpoint.hf.tensor_files import TensorFiles, TensorToWrite, write_shards
from graphmoe.checkpoint.metadata_file import StoredPart, read_metadata, read_plain, read_tensor
from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.config.schema import CheckpointConfig, ConfigError
from graphmoe.config.untrusted import read_json, read_yaml
from graphmoe.run.files import ExpertLoad, MetricsRow, Summary
from graphmoe.run.metrics_file import read_lines
from graphmoe.run.stored import StoredRun
from graphmoe.trace.events import read_trace
from tests.kineto import FACTS, two_steps

INPUTS, SECONDS, BYTES = 10_000, 2.0, 2**30
TOKENS = [
    b"null",
    b"NaN",
    b"1e999",
    b"-1",
    b"[[",
    b"{}",
    b"\xff",
    b"\\u0000",
    b"9" * 400,
    b'""',
    b"true",
    b"2\x86",
    b"}]",
]


def mutated(content: bytes, chance: random.Random) -> bytes:
    found = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at, kind = chance.randrange(len(found) + 1), chance.randrange(6)
        if kind == 0:
            found[at : at + 1] = bytes([chance.randrange(256)])
        elif kind == 1:
            del found[at : at + chance.choice((1, 2, 16, 1000))]
        elif kind == 2:
            found[at:at] = chance.choice(TOKENS)
        elif kind == 3:
            other = chance.randrange(len(found) + 1)
            found[at:at] = found[other : other + chance.choice((1, 8, 100))]
        elif kind == 4:
            found[at : at + 8] = chance.choice((2**63 - 1, 2**31, 0, 2**64 - 1)).to_bytes(8, "little")
        else:
            found[at:at] = chance.choice(TOKENS) * chance.choice((10, 1000))
    return bytes(found)


def kinds(folder):
    """Files as graphmoe writes them, with their readers."""
    state = {"x": torch.arange(6.0).view(2, 3), "deep": {"values": [1, (2.5, "a"), b"raw"]}}
    store = CheckpointStore(folder / "checkpoints", CheckpointConfig())
    store.save(1, state, wait=True)
    step = folder / "checkpoints" / "step_00000001"
    torch.save(("a", ["b", {"c": 1}], b"raw"), folder / "plain")
    torch.save(state["x"], folder / "tensor")
    rows = [{"step": n, "loss": 2.5, "load_max_over_mean": [1.0, 2.0], "skipped": False} for n in range(20)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "loads.jsonl").write_text(json.dumps({"step": 1, "steps": 1, "load": [[1.0, 2.0]]}) + "\n")
    (folder / "summary.json").write_text(json.dumps({"finished": True, "steps": 4, "final_loss": 2.5}))
    (folder / "resolved.yaml").write_text(
        "model: {num_layers: 2}\ntrain: {micro_batch_size: 4}\ndata: {source: x}\n"
    )
    two_steps().write(folder / "trace.json", FACTS)
    write_shards(folder, "weights", tensors(), 100, lambda num_bytes: None)
    return {
        step / ".metadata": lambda path: read_metadata(path.parent),
        step / "manifest.json": lambda path: read_metadata(path.parent),
        folder / "plain": lambda path: read_plain(path.read_bytes()),
        folder / "tensor": lambda path: first_format(path, state["x"]),
        folder / "metrics.jsonl": lambda path: read_lines(path, MetricsRow),
        folder / "loads.jsonl": lambda path: read_lines(path, ExpertLoad),
        folder / "summary.json": lambda path: read_json(path, Summary),
        folder / "resolved.yaml": lambda path: read_yaml(path, StoredRun),
        folder / "trace.json": read_trace,
        next(folder.glob("*.safetensors")): lambda path: TensorFiles(path.parent, "weights"),
        folder / "weights.safetensors.index.json": lambda path: TensorFiles(path.parent, "weights"),
    }


def first_format(path, tensor):
    with path.open("rb") as file:
        part = StoredPart(path.name, 0, path.stat().st_size)
        return read_tensor(file, part, tensor.dtype, tensor.shape)


def tensors():
    return [TensorToWrite(name, (3, 4), torch.float32, lambda: torch.ones(3, 4)) for name in "abcd"]


@pytest.mark.slow
def test_ten_thousand_damaged_files_end_in_a_value_or_an_error_soon(tmp_path):
    readers, soft = kinds(tmp_path), resource.getrlimit(resource.RLIMIT_AS)
    good, used = {path: path.read_bytes() for path in readers}, psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, soft[1]))  # beyond it a MemoryError
    try:
        for path, read in readers.items():
            known = Exception if path.name in ("plain", "tensor") else (ConfigError, CheckpointError)
            for seed in range(INPUTS // len(readers)):
                content, began = mutated(good[path], random.Random(f"{path.name} {seed}")), time.monotonic()
                path.write_bytes(content)
                try:
                    read(path)
                except (MemoryError, RecursionError):
                    raise
                except known as error:
                    assert str(error).count("\n") <= 12, (path.name, seed)  # long lines are shortened
                except Exception as error:
                    raise AssertionError(f"{path.name}, seed {seed}: {error!r}") from error
                assert time.monotonic() - began < SECONDS, (path.name, seed)
            path.write_bytes(good[path])
            read(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, soft)
