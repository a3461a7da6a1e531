"""Wrong configurations, by a seed: each is refused in one line that names the key, or it trains."""

import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from graphmoe.command.errors import known_keys
from graphmoe.config.arguments import LONGEST_LINE
from tests.runs import TINY, Command

pytestmark = pytest.mark.slow

CASES = 400
PARTS = 8  # tests that share the cases
# parts draw alike: the two that a suite runs have each form, and most values and sections of keys
IN_SUITE = [pytest.param(n, marks=[pytest.mark.exhaustive] if n % 4 else ()) for n in range(PARTS)]
MOST_S = 10  # until a command has answered
COMPILE_S = 60  # until a run has made its first step, for a value that asks for compiled code
NUMBERS = (
    "-1", "0", "1", "3", "1.5", "1000000000", "2147483648", "9223372036854775807", "9223372036854775808",
    "1" * 400, "-" + "1" * 400, "nan", "inf", "-inf", "1e400", "1e300", "1e-46", "1e-400", "1_000", "0x10",
)  # fmt: skip
NOTHINGS = ("", "null", "[]", "{}", "[[]]", "[null]", "{a:1}", "[1,2]", "''")
TEXTS = (
    "x", "-", "~", "true", "nope.txt", "../x", "/dev/null/x", "/proc/x", "/", "y" * 5000, "é", "'a b'",
    "'a=b'", "'='", "'\x1b[2J'", "'a\tb'", "'a\nb'", "'\ud800'", "'", "\"", "[", "{", "a:b", "a:b:1",
    "%s", "*", "**", "${", "${oc.env:HOME}", "${oc.env:NOT_THERE}", "${nope}", "${model.name}", "???",
    "[x]", "[x,x]", "{'':x}", "{A:null}", "{'A=B':x}",
)  # fmt: skip
VALUES = (*NUMBERS, *NOTHINGS, *TEXTS)
GROUPS = ("model", "data", "optim", "moe", "compile", "parallel", "hydra/launcher", "hydra/sweeper", "nope")
HYDRA_KEYS = ("run.dir", "sweep.dir", "job.chdir", "verbose", "mode", "output_subdir")


def bad_word(rng: random.Random) -> tuple[str, str]:
    key, value = rng.choice(known_keys()), rng.choice(VALUES)
    form = rng.choice(("value",) * 16 + ("typo", "typo", "add", "force", "delete", "bare", "group", "hydra"))
    if form == "typo":
        at = rng.randrange(len(key))
        key = key[:at] + rng.choice(("", "x", "..", " ")) + key[at + 1 :]
    if form == "group":
        key = rng.choice(GROUPS)
    if form == "hydra":
        key = f"hydra.{rng.choice(HYDRA_KEYS)}"
    word = {"add": f"+{key}={value}", "force": f"++{key}={value}", "delete": f"~{key}", "bare": key}
    return word.get(form, f"{key}={value}"), key


def answer(folder: Path, words: list[str], bad_keys: list[str]) -> str | None:
    folder.mkdir()
    started = Command(folder, (*TINY, "train.steps=2", *words))
    process = started.process
    process.join(MOST_S)

    def said() -> str:
        return started.err.read_text(errors="replace")

    def has_trained() -> bool:
        return any(b'"loss"' in path.read_bytes() for path in folder.rglob("metrics.jsonl"))

    if process.is_alive() and "run folder: " in said():
        started.wait_until(has_trained, COMPILE_S)
    if process.is_alive():
        trains = has_trained()
        started.kill(signal.SIGTERM)
        process.join(MOST_S)
        if process.is_alive():
            started.kill(signal.SIGKILL)
            return f"runs on after SIGTERM: {said()}"
        return None if trains else f"nothing in {MOST_S} s: {said()}"
    if "Traceback" in said() or process.exitcode not in (0, 1, 2):
        return f"status {process.exitcode}: {said()[-1500:]}"
    if process.exitcode == 0:
        return None if started.out.read_text(errors="replace").strip() else "it ends without a word"
    _, error, refusal = said().partition("error: ")
    if not error or not any((key.rpartition(".")[2] or key) in refusal for key in bad_keys):
        return f"no key is named: {said()[-1500:]}"
    if re.search(r"[\x00-\x09\x0b-\x1f]", refusal) or max(map(len, refusal.splitlines())) > LONGEST_LINE + 99:
        return f"control characters, or a very long line: {refusal[:1500]!r}"
    return None


@pytest.mark.parametrize("part", IN_SUITE)
def test_a_wrong_configuration_is_refused_by_the_name_of_its_key_or_trains(tmp_path, part):
    wrong: dict[str, Any] = {}
    for number in range(part, CASES, PARTS):
        rng = random.Random(f"bad configuration {number}")
        words, bad_keys = zip(*(bad_word(rng) for _ in range(rng.choice((1, 1, 1, 2)))), strict=True)
        began = time.monotonic()
        if found := answer(tmp_path / str(number), [*words], [*bad_keys]):
            wrong[f"{number} ({time.monotonic() - began:.1f} s): {' '.join(words)[:200]!r}"] = found
    assert wrong == {}
    assert all(child.name.isdigit() for child in tmp_path.iterdir())  # '../x' was written nowhere
