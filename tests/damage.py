"""Damages of files, by a seed: of their bytes, of what they are, of values in JSON and YAML; a full disk."""

import gzip
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import traceback
from contextlib import contextmanager
from pathlib import Path

import yaml

VALUES = (
    None, True, -1, 0, 2**31, 10**9, 10**400, 1.5, float("nan"), float("inf"), "", "x", "../../x",
    "\x00\x1b[2J", "${oc.env:HOME}", "y" * 5000, [], [[]], [None], {}, {"a": 1}, [1, "2"],
)  # fmt: skip
KINDS = ("cut", "empty", "flip", "noise", "gone", "folder", "fifo", "link", *["value"] * 4)
MOST_S = 10


class TooLong(BaseException):
    """Error that no handler on the way catches."""


@contextmanager
def limited():
    def end(number, frame):
        raise TooLong

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(MOST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def failures(name, source, work, outcome, cases):
    """Failures over a seeded list of damages: ``outcome`` returns what is wrong, if anything is."""
    found = []
    for number in range(cases):
        told = damage(fresh_copy(source, work), random.Random(f"{name} {number}"))
        try:
            with limited():
                wrong = outcome(work, number)
        except TooLong:
            wrong = f"more than {MOST_S} s: {traceback.format_exc().splitlines()[-4:]}"
        except Exception:
            wrong = traceback.format_exc()[-1500:]
        if wrong:
            found.append(f"{number}: {told}: {wrong}")
    return found


def damage(folder, rng):
    """Damage one file of a folder; says which and how."""
    path = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    kind = rng.choice(KINDS)
    told = kind
    if kind == "value" and (told := _other_value(path, rng)) == "":
        kind = told = "flip"
    content = path.read_bytes()
    if kind == "cut":
        path.write_bytes(content[: rng.randrange(max(len(content), 1))])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "flip" and content:
        flipped = bytearray(content)
        for _ in range(rng.randrange(1, 9)):
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
    elif kind == "noise":
        path.write_bytes(rng.randbytes(200))
    elif kind in ("gone", "folder", "fifo", "link"):
        path.unlink()
        makers = {"folder": Path.mkdir, "fifo": os.mkfifo}
        makers |= {"gone": lambda path: None, "link": lambda path: path.symlink_to("nowhere")}
        makers[kind](path)
    if rng.random() < 0.7:  # by who made the folder, and not by a disk
        _fit_sums(folder)
    return f"{path.relative_to(folder)}: {told}"


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@contextmanager
def no_file_beyond(num_bytes):
    """Let no file of this process grow beyond a size: a write takes what still fits, the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fresh_copy(source, to):
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(source, to, symlinks=True)
    return to


def dead_pid():
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


def _other_value(path, rng):
    """Replace or drop one value of a document; nothing for a file of another kind."""
    try:
        read, write = _FORMATS["".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix]
        document = read(path.read_bytes())
        places = list(_places(document))
        owner, key = rng.choice(places)
    except (KeyError, ValueError, IndexError, yaml.YAMLError):
        return ""
    value = rng.choice(VALUES)
    if rng.random() < 0.15:
        del owner[key]
        told = f"{key} dropped"
    else:
        owner[key] = value
        told = f"{key}={str(value)[:40]!r}"
    content = write(document)
    if path.suffix == ".yaml" and rng.random() < 0.2:  # what plain values do not lead to
        told = rng.choice(("!!bool x", "!!int ''", "!!timestamp x", "&a [*a]", "[" * 100_000))
        content = re.sub(rb": \S+$", lambda _: f": {told}".encode(), content, count=1, flags=re.MULTILINE)
    path.write_bytes(content)
    return told[:40]


def _places(node):
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield node, key
        yield from _places(value)


def _as_json(document):
    return json.dumps(document).encode()


_FORMATS = {
    ".json": (json.loads, _as_json),
    ".jsonl": (lambda content: [*map(json.loads, content.splitlines())],
               lambda rows: b"".join(_as_json(row) + b"\n" for row in rows)),
    ".yaml": (yaml.safe_load, lambda document: yaml.safe_dump(document).encode()),
    ".json.gz": (lambda content: json.loads(gzip.decompress(content)),
                 lambda document: gzip.compress(_as_json(document))),
}  # fmt: skip


def _fit_sums(folder):
    """Give the manifests of checkpoints the sums of the files as they are now."""
    for path in filter(Path.is_file, folder.rglob("manifest.json")):
        try:
            document = json.loads(path.read_text())
            files = {name: path.with_name(name) for name in document["files"]}
            contents = {name: file.read_bytes() for name, file in files.items() if file.is_file()}
            for name, content in contents.items():
                sha256 = hashlib.sha256(content).hexdigest()
                document["files"][name] = {"sha256": sha256, "num_bytes": len(content)}
            path.write_text(json.dumps(document))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue  # this one is what was damaged
