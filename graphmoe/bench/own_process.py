"""Runs a function in a fresh Python process, whose memory and caches of the device go with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from graphmoe.bench.cases import reason
from graphmoe.config.schema import ConfigError
from graphmoe.runtime.host.signals import die_with_parent

Result = TypeVar("Result")
END_S = 10
"""Seconds that a process may take to end after it has given its result."""


class ProcessFailed(Exception):
    """Why a process gave no result."""


def in_own_process(function: Callable[..., Result], *arguments: Any, limit_s: float) -> Result:
    """``function(*arguments)``, all of which must be picklable. *Raises* ProcessFailed.

    The process is killed after ``limit_s`` seconds. What it prints on stdout goes to stderr.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, function, arguments))
    process.start()
    sender.close()
    patience_s = 0.0
    try:
        if not receiver.poll(limit_s):
            raise ProcessFailed(f"not done after limit_s={limit_s:g} seconds, compilation included; use more")
        result, error = receiver.recv()
        patience_s = END_S
    except (EOFError, OSError):  # it died, perhaps while it sent
        process.join(END_S)
        raise ProcessFailed(_ended(process.exitcode)) from None
    finally:
        process.join(patience_s)
        process.kill()
        process.join()
    if error is not None:
        raise ProcessFailed(error)
    return result


def _run(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """What the process does: send (result, None) or (None, reason)."""
    die_with_parent()  # so that the device is free where nobody waits any more
    os.dup2(2, 1)  # stdout of the tool holds its document alone
    try:
        sender.send((function(*arguments), None))
    except ConfigError as error:
        sender.send((None, str(error)))
    except Exception as error:
        traceback.print_exc()
        sender.send((None, reason(error)))


def _ended(status: int | None) -> str:
    if status is not None and status < 0:
        names = {each.value: each.name for each in signal.Signals}
        return f"its process was killed by {names.get(-status, f'signal {-status}')}"
    return f"its process ended with status {status}"
