"""Process that writes and hashes files beside a trainer, whose GIL it never holds.

This file is both its program, for which it imports the standard library only, and the trainer's handle.
A request and its answer are one line of JSON each. Tensors are in memory that both processes map.
"""

import base64
import contextlib
import functools
import hashlib
import io
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

BLOCK_BYTES = 4 << 20
_SYNC_BYTES = 1 << 30  # synced at once, so that the last sync is no long silence
_POLL_S = 1.0


class Place(NamedTuple):
    """Bytes in shared memory: ``length`` from ``offset``, in (count, stride) loops, the outer one first."""

    offset: int
    length: int
    loops: Sequence[tuple[int, int]] = ()

    def parts(self, memory: memoryview) -> Iterator[memoryview]:
        if not self.loops:
            yield memory[self.offset : self.offset + self.length]
            return
        (count, stride), *inner = self.loops
        for number in range(count):
            yield from Place(self.offset + number * stride, self.length, inner).parts(memory)


def write_file(
    path: Any, parts: Iterable[Any], check: Callable[[], object] = lambda: None,
    opener: Callable[[Any, str], Any] = open,
) -> tuple[str, int]:  # fmt: skip
    """Write and fsync a file; return its SHA-256 and size. ``check`` is called before each block."""
    digest, num_bytes = hashlib.sha256(), 0
    with opener(path, "wb") as file:
        for part in parts:
            for at in range(0, len(part), BLOCK_BYTES):
                check()
                block = part[at : at + BLOCK_BYTES]
                digest.update(block)
                num_bytes += file.write(block)
                if not num_bytes % _SYNC_BYTES:
                    _sync(file)
        _sync(file)
    return digest.hexdigest(), num_bytes


def _sync(file: Any) -> None:
    file.flush()
    with contextlib.suppress(io.UnsupportedOperation):  # a file at a URL has no descriptor
        os.fsync(file.fileno())


class Saver:
    """Handle of a saver process, which ends with this one. Answers come in the order of requests."""

    def __init__(self, memory: int | None = None, program: str = __file__) -> None:
        """Start the process. ``memory``: file descriptor to share; another ``program`` imports packages."""
        self._socket, theirs = socket.socketpair()
        descriptors = [theirs.fileno(), *([] if memory is None else [memory])]
        flags = ["-P", *["-S"] * (program == __file__)]
        words = [sys.executable, *flags, program, str(os.getpid()), *map(str, descriptors)]
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        # it inherits the mask: a signal to the whole job, such as Ctrl-C, must not end it before a last save
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._process = subprocess.Popen(
                words, pass_fds=descriptors, stdin=subprocess.DEVNULL, env=environment
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._received = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def write(self, path: Path, parts: Sequence[bytes | Place]) -> tuple[str, int]:
        """Write and fsync a file in the process; return its SHA-256 and size. *Raises* OSError."""
        # a line for each part, since one call of json.dumps for many would hold the GIL
        coded = (part if isinstance(part, Place) else base64.b64encode(part).decode() for part in parts)
        self.ask("write", *map(json.dumps, coded), path=str(path.absolute()), lines=len(parts))
        sha256, num_bytes = self.answer()
        return sha256, num_bytes

    def ask(self, action: str, *lines: str, **named: Any) -> None:
        """Send a request and what follows it. *Raises* OSError if the process has ended."""
        request = json.dumps({"action": action, **named})
        try:
            self._socket.sendall("\n".join((request, *lines, "")).encode())
        except OSError as error:
            raise self._ended() from error

    def has_answer(self, patience_s: float | None = 0.0) -> bool:
        """Return whether an answer is there; wait if signs of life are at most ``patience_s`` apart."""
        while b"\n" not in self._received.lstrip(b"\n"):
            if not _is_readable(self._socket, patience_s):
                return False
            try:
                received = self._socket.recv(1 << 16)
            except OSError as error:
                raise self._ended() from error
            if not received:
                raise self._ended()
            self._received += received
        return True

    def answer(self) -> Any:
        """Wait for the next answer. *Raises* OSError of the request, or if the process has ended."""
        self.has_answer(None)
        line, _, self._received = self._received.lstrip(b"\n").partition(b"\n")
        found = json.loads(line)
        if "error" in found:
            raise OSError(*found["error"])
        return found["answer"]

    def close(self) -> None:
        """End the process, also in the middle of a request."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _ended(self) -> OSError:
        status = self._process.wait()
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return ConnectionError(f"the saver process {self.pid} ended ({how}) before it answered")


class Program:
    """Program of a saver process: answers requests by its actions until its parent has ended."""

    def __init__(self, parent: int, descriptor: int) -> None:
        self._parent, self._socket = parent, socket.socket(fileno=descriptor)
        self._told_s = 0.0

    def run(self, **actions: Callable[..., Any]) -> None:
        """Answer requests. Each action gets the request's names, and ``check`` to call now and then."""
        with contextlib.suppress(ConnectionError), self._socket.makefile("rb") as requests:
            while True:
                # children that the trainer forked may hold its end open, so its end alone does not tell
                while not _is_readable(self._socket, _POLL_S):
                    self._check()
                if not (line := requests.readline()):
                    return
                request = json.loads(line)
                if "lines" in request:
                    request["lines"] = [json.loads(requests.readline()) for _ in range(request["lines"])]
                answer = self._outcome(actions[request.pop("action")], request)
                self._socket.sendall(json.dumps(answer).encode() + b"\n")

    def _outcome(self, action: Callable[..., Any], request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"answer": action(**request, check=self._check)}
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                return {"error": (error.errno, error.strerror, error.filename)}
            return {"error": (" ".join(f"{type(error).__name__}: {error}".split()),)}

    def _check(self) -> None:
        if os.getppid() != self._parent:
            os._exit(0)
        if time.monotonic() > self._told_s + _POLL_S:
            self._told_s = time.monotonic()
            with contextlib.suppress(BlockingIOError):  # the trainer reads only while it waits
                self._socket.send(b"\n", socket.MSG_DONTWAIT)


def _is_readable(peer: socket.socket, patience_s: float | None) -> bool:
    waiting = select.poll()  # select() takes no file number above 1023, which rank 0 of many has
    waiting.register(peer, select.POLLIN)
    return bool(waiting.poll(None if patience_s is None else 1e3 * patience_s))


def _write(memory: int, path: str, lines: list[Any], check: Callable[[], object]) -> tuple[str, int]:
    def contents() -> Iterator[Any]:
        mapped = None
        for part in lines:
            if isinstance(part, str):
                yield base64.b64decode(part)
                continue
            if mapped is None:
                mapped = memoryview(mmap.mmap(memory, 0, prot=mmap.PROT_READ))
            yield from Place(*part).parts(mapped)

    return write_file(path, contents(), check)


if __name__ == "__main__":
    parent, descriptor, memory = map(int, sys.argv[1:])
    Program(parent, descriptor).run(write=functools.partial(_write, memory))
