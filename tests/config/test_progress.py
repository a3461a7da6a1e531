"""Progress of what takes long, as lines and in a live bar."""

import io
import itertools
import subprocess
import sys
import threading
import time

import pytest
from rich.console import Console

from graphmoe.config import progress
from graphmoe.config.arguments import emit
from graphmoe.config.progress import counting, shown_in, starting, working
from graphmoe.config.schema import OutputFormat
from graphmoe.runtime.host.logs import Progress


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 0.05)


def wait_until(holds) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_block_is_said_ever_more_rarely_while_it_runs_and_not_after_it(caplog):
    with caplog.at_level("INFO"), counting("tokenising", 8 << 20) as on_bytes:
        on_bytes(2 << 20)
        wait_until(lambda: len(caplog.records) == 4)
    assert caplog.messages[0] == "tokenising: 25% of 8.0 MiB (0 s)"
    pairs = itertools.pairwise(record.created for record in caplog.records)
    assert [round((b - a) / 0.05) for a, b in pairs] == [2, 4, 8]
    assert all(each.name != "graphmoe-progress" for each in threading.enumerate())


def test_without_a_log_the_lines_are_on_stderr(monkeypatch, capfd):
    monkeypatch.setattr(progress.logging.getLogger(), "handlers", [])
    with working("searching"):
        wait_until(lambda: "searching (0 s)\n" in capfd.readouterr().err)


def test_on_a_terminal_one_line_is_rewritten_below_what_is_printed(monkeypatch, capsys):
    screen = Console(file=io.StringIO(), force_terminal=True, width=40)
    monkeypatch.setattr(progress.logging.getLogger(), "handlers", [])
    monkeypatch.setattr(progress, "console", lambda: screen)
    with working("searching [all] of them"):
        wait_until(lambda: screen.file.getvalue().count("searching [all] of them (0 s)") > 1)
        print("a warning", file=sys.stderr)
        print("a result")
    text = screen.file.getvalue().replace("\r", "")
    assert "\x1b[2Ka warning\nsearching [all]" in text and text.endswith("\x1b[1A\x1b[2K")
    assert capsys.readouterr().out == "a result\n"


def test_of_blocks_inside_each_other_the_innermost_is_said(caplog):
    with caplog.at_level("INFO"), working("all"), working("a part"):
        wait_until(lambda: "a part (0 s)" in caplog.messages)
    assert "all (0 s)" not in caplog.messages


def test_a_command_that_has_nothing_to_say_says_that_it_is_at_work(monkeypatch, capfd):
    monkeypatch.setattr(progress.logging.getLogger(), "handlers", [])
    monkeypatch.setattr(progress, "_has_output", threading.Event())
    monkeypatch.delitem(sys.modules, "torch")
    starting("graphmoe.mine")
    said = ""

    def is_said() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "graphmoe.mine: at work (0 s)\n" in said

    wait_until(is_said)
    assert said.startswith("graphmoe.mine: starting\n")
    emit({}, "text", OutputFormat.text, end="")  # which no other line is to be amid
    wait_until(lambda: all(each.name != "graphmoe-at-work" for each in threading.enumerate()))


def test_in_a_terminal_the_bar_has_the_words_and_then_its_own_again(caplog):
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    shown: list[str] = []
    with caplog.at_level("INFO"), Progress(console, 3, wanted=True) as bar, shown_in(shown.append):
        with working("compiling unit 3 of 7"):
            wait_until(lambda: shown)
        assert shown[0].startswith("compiling unit 3 of 7 (") and shown[-1] == ""
        bar._describe(shown[0])
        bar._bar.refresh()
    assert not caplog.messages and "compiling unit 3 of 7" in console.file.getvalue()


@pytest.mark.parametrize("words", ["report run=nothing format=json", "train host.threads=1000000"])
def test_a_command_says_that_it_starts_before_it_imports_torch(tmp_path, words):
    name, *rest = words.split()
    line = [sys.executable, "-m", f"graphmoe.{name}", *rest]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"graphmoe.{name}: starting\nerror: ")
