"""Checkpoints that somebody else wrote: nothing in them runs, and nothing unchecked is read."""

import builtins
import functools
import io
import json
import os
import pickle
import random
import struct
import time
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties

from graphmoe.checkpoint import CheckpointError
from graphmoe.checkpoint.metadata_file import StoredPart, read_tensor
from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.config.schema import CheckpointConfig

TENSOR = torch.arange(6.0).view(2, 3)
VALUE = "a value of the state"
DCP, GLOBALS = "torch.distributed.checkpoint", "__init__.__globals__"
PROTO, STOP = b"\x80\x04", b"."


def saved_in(folder: Path) -> Path:
    store = CheckpointStore(folder, CheckpointConfig())
    store.save(1, {"x": TENSOR, "step": 1, "value": VALUE}, wait=True)
    return folder / "step_00000001"


def replace_file(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    manifest = path.parent / "manifest.json"
    document = json.loads(manifest.read_text())
    document["files"][path.name] = {"sha256": sha256(content).hexdigest(), "num_bytes": len(content)}
    manifest.write_text(json.dumps(document))


def load(folder: Path) -> dict:
    state = {"x": torch.zeros(2, 3), "step": 0, "value": ""}
    CheckpointStore.open_any(folder).load(state)
    return state


class Calls:
    """Object that is pickled as a call."""

    def __init__(self, function, *args, state=None) -> None:
        self.call = (function, args) if state is None else (function, args, state)

    def __reduce__(self):
        return self.call


MKDIR = Calls(os.mkdir, "mark")


def saved_by_torch(value: object) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def text(word: str) -> bytes:
    return b"\x8c" + bytes([len(word)]) + word.encode()


def stack_global(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls what STACK_GLOBAL resolves, which goes through dots, with one argument."""
    return PROTO + text(module) + text(name) + b"\x93" + text(argument) + b"\x85R" + STOP


def payloads(mark: str) -> dict[str, bytes]:
    """Pickles each of which makes a folder of that name where it is read by pickle.load."""
    command, code = f"mkdir {mark}", f"__import__('os').mkdir({mark!r})"
    pickled = {
        "os.system": Calls(os.system, command),
        "eval": Calls(builtins.eval, code),
        "exec": Calls(builtins.exec, code),
        "mkdir": Calls(os.mkdir, mark),
        "partial": Calls(functools.partial(os.system, command)),
        "inside our own class": Metadata({}, planner_data=Calls(os.mkdir, mark)),
        "as the state of our own class": {"state": Calls(os.mkdir, mark), "x": TensorProperties()},
    }
    documents = {name: pickle.dumps(payload) for name, payload in pickled.items()}
    return documents | {
        "a path of names": stack_global("torch", "os.mkdir", mark),
        "a path of names from our module": stack_global(f"{DCP}.metadata", "os.mkdir", mark),
        "a path of names from our class": stack_global(f"{DCP}.filesystem", f"_StorageInfo.{GLOBALS}", mark),
        "the old opcode": f"cposix\nmkdir\n(V{mark}\ntR.".encode(),
        "the instance opcode": f"(V{mark}\niposix\nmkdir\n.".encode(),
        "numpy's helper": stack_global("numpy.testing._private.utils", "runstring", code),
        "a loader in a loader": stack_global("torch.storage", "_load_from_bytes", code),
        "torch's rebuilder": stack_global("torch._utils", "_rebuild_tensor_v2", code),
    }


NAMES = sorted(payloads("mark"))


def as_entry(folder: Path, name: str, content: bytes) -> None:
    path, saved = folder / "__0_0.distcp", FileSystemReader(folder).read_metadata()
    before = path.read_bytes()
    for index, part in saved.storage_data.items():
        if index.fqn == name:
            part.offset, part.length = len(before), len(content)
    replace_file(path, before + content)
    replace_file(folder / ".metadata", pickle.dumps(saved))


@pytest.mark.parametrize("name", NAMES)
def test_files_that_name_code_run_none_of_it_and_the_error_names_the_file(tmp_path, monkeypatch, name):
    folder, payload = saved_in(tmp_path / "run"), payloads("mark")[name]
    monkeypatch.chdir(tmp_path)
    metadata = (folder / ".metadata").read_bytes()
    entries = [("value", payload), ("x", payload)]
    if name == "mkdir":  # in torch's own format
        entries += [("value", saved_by_torch(call)) for call in (MKDIR, (("value",), MKDIR))]
    for entry, content in entries:
        as_entry(folder, entry, content)
        with pytest.raises(CheckpointError, match=r"__0_0\.distcp was not written by graphmoe"):
            load(folder)
        replace_file(folder / ".metadata", metadata)
    replace_file(folder / ".metadata", payload)
    with pytest.raises(CheckpointError, match=r"step_00000001/\.metadata is not what a checkpoint"):
        load(folder)
    assert not (tmp_path / "mark").exists()


def test_a_value_of_another_type_or_place_is_refused(tmp_path):
    folder = saved_in(tmp_path)
    for payload, said in [
        (VALUE, "value is not of the form that graphmoe writes"),
        ((("step",), VALUE), "value is not of the form that graphmoe writes"),
        ((("value",), TENSOR), r"not written by graphmoe \(UnpicklingError\)"),
        ((("value",), {1, 2}), r"not written by graphmoe \(UnpicklingError\)"),
        ((("value",), 7), "value is a int, but here a str"),
    ]:
        as_entry(folder, "value", saved_by_torch(payload))
        with pytest.raises(CheckpointError, match=said):
            load(folder)


PAIRS = b")" + 64 * b"2\x86"  # an empty tuple, then 64 times a pair of what was there
LARGE = {
    "pairs of pairs": PAIRS,
    "as a key": b"}" + PAIRS + b"K\x01s",
    "as one of several keys": b"}(" + PAIRS + b"K\x01u",
    "as a key of a whole dictionary": b"(" + PAIRS + b"K\x01d",
    "a bytearray of 16 GiB": b"\x96" + (2**34).to_bytes(8, "little"),
    "a list that has itself a million times": b"]\x94(" + 2**20 * b"h\x00" + b"e",
    "as the shape of a tensor": b"ctorch._utils\n_rebuild_tensor_v2\n(NK\x00" + PAIRS + b"2tR",
}
RECORDS = struct.pack("<4s42xc", b"PK\x01\x02", b"x") * 2**17


@pytest.mark.parametrize("body", LARGE.values(), ids=LARGE)
def test_small_pickles_of_large_values_are_refused_at_once(tmp_path, body):
    folder, content, began = saved_in(tmp_path), io.BytesIO(), time.monotonic()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", PROTO + body + STOP)
        archive.writestr("archive/data/0", bytes(24))
    for entry in ("value", "x"):
        entry_began, metadata = time.monotonic(), (folder / ".metadata").read_bytes()
        as_entry(folder, entry, content.getvalue())
        with pytest.raises(CheckpointError, match="not written by graphmoe"):
            load(folder)
        assert entry == "value" or time.monotonic() - entry_began < 2
        replace_file(folder / ".metadata", metadata)
    replace_file(folder / ".metadata", PROTO + body + STOP)
    with pytest.raises(CheckpointError, match="is not what a checkpoint of graphmoe has"):
        load(folder)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("entry", ["value", "large"])
def test_a_long_list_of_records_is_refused_at_once(tmp_path, entry):
    """The list takes the place of the elements, so the length of the entry is right."""
    end = struct.pack("<4s4xHHIIH", b"PK\x05\x06", 0xFFFF, 0xFFFF, len(RECORDS), 0, 0)
    state = {"value": VALUE, "large": torch.zeros(len(RECORDS), dtype=torch.uint8)}
    CheckpointStore(tmp_path, CheckpointConfig()).save(1, state, wait=True)
    as_entry(tmp_path / "step_00000001", entry, RECORDS + end)
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"not written by graphmoe \(BadZipFile\)"):
        CheckpointStore.open_any(tmp_path).load({**state})
    assert time.monotonic() - began < 2


DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_the_first_format_are_read_with_any_strides(tmp_path, dtype):
    whole = torch.randint(0, 2, (3, 4, 5)).to(dtype)
    for tensor in (whole, whole.permute(2, 0, 1), whole[0, 0, 0].clone(), whole[:0].clone()):
        path = tmp_path / "tensor"
        path.write_bytes(b"before" + saved_by_torch(tensor) + b"after")
        part = StoredPart("tensor", 6, path.stat().st_size - 11)
        with path.open("rb") as file:
            found = read_tensor(file, part, dtype, tensor.shape)
        assert found.dtype == dtype and found.shape == tensor.shape
        assert torch.equal(found.float(), tensor.float())


@pytest.mark.parametrize("place", ["/etc/hostname", "../secret", "a/b", "..", "", "other"])
def test_entries_lie_in_files_of_their_folder_that_the_manifest_names_only(tmp_path, place):
    folder = saved_in(tmp_path)
    (folder / "other").write_bytes((folder / "__0_0.distcp").read_bytes())
    saved = FileSystemReader(folder).read_metadata()
    for part in saved.storage_data.values():
        part.relative_path = place
    replace_file(folder / ".metadata", pickle.dumps(saved))
    unnamed = r"01/other is not listed in manifest\.json"
    said = unnamed if place == "other" else f"names '{place}', which is not a file of its folder"
    with pytest.raises(CheckpointError, match=said):
        load(folder)


@pytest.mark.parametrize("files", [{}, {"__0_0.distcp": {}}, {"../x": {}, ".metadata": {}}])
def test_a_manifest_that_does_not_name_what_is_read_is_damage(tmp_path, caplog, files):
    folder = saved_in(tmp_path)
    document = json.loads((folder / "manifest.json").read_text())
    document["files"] = dict.fromkeys(files, document["files"][".metadata"])
    (folder / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="the checkpoints of steps .* are damaged"):
        load(folder)
    assert "manifest.json: it must name .metadata, and files of its own folder only" in caplog.text


def test_a_fifo_in_place_of_a_file_is_damage_and_not_waited_for(tmp_path, caplog):
    folder = saved_in(tmp_path)
    for name in ("__0_0.distcp", ".metadata"):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(CheckpointError, match="the checkpoints of steps .* are damaged"):
            load(folder)
        assert f"{name}: not a regular file" in caplog.text
        (folder / name).unlink()
        (folder / name).write_bytes(content)
    assert load(folder)["value"] == VALUE


HALF = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((1, 3)))


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: saved.state_dict_metadata["x"].chunks.clear(),
        lambda saved: setattr(saved.state_dict_metadata["x"], "size", torch.Size((2, -3))),
        lambda saved: setattr(saved.state_dict_metadata["x"].chunks[0], "offsets", torch.Size((1, 0))),
        lambda saved: setattr(saved.state_dict_metadata["x"], "properties", "float32"),
        lambda saved: setattr(saved.state_dict_metadata["x"], "chunks", [HALF, HALF]),
        lambda saved: saved.storage_data.clear(),
        lambda saved: setattr(saved, "storage_data", None),
        lambda saved: setattr(saved, "state_dict_metadata", [1]),
    ],
)
def test_metadata_that_do_not_fit_together_are_refused(tmp_path, change):
    folder = saved_in(tmp_path)
    saved = FileSystemReader(folder).read_metadata()
    change(saved)
    replace_file(folder / ".metadata", pickle.dumps(saved))
    with pytest.raises(CheckpointError, match=r"\.metadata is not what a checkpoint of graphmoe has"):
        load(folder)


def test_flipped_bytes_of_files_whose_sums_fit_are_refused_or_harmless(tmp_path):
    folder, rng = saved_in(tmp_path), random.Random(0)
    refused = 0
    for name in (".metadata", "__0_0.distcp"):
        whole = (folder / name).read_bytes()
        for _ in range(60):
            content = bytearray(whole)
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            replace_file(folder / name, bytes(content))
            try:
                load(folder)
            except CheckpointError:
                refused += 1
        replace_file(folder / name, whole)
    assert refused > 40


def test_a_pickle_that_sets_attributes_of_a_class_leaves_the_next_read_as_it_was(tmp_path):
    folder = saved_in(tmp_path)
    good = (folder / ".metadata").read_bytes()
    known = text(f"{DCP}.metadata") + text("Metadata") + b"\x93"
    replace_file(folder / ".metadata", PROTO + known + b"N}" + text("state") + b"Ns\x86b" + STOP)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        load(folder)
    replace_file(folder / ".metadata", good)
    assert load(folder)["step"] == 1 and not hasattr(Metadata, "state")
