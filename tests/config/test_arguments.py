"""The ``key=value`` arguments, the output and the errors of the small tools."""

import enum
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen
from unittest.mock import Mock

import pytest

from graphmoe.config.arguments import emit, file_problems, parse_args, print_error, run_tool
from graphmoe.config.schema import ConfigError, OutputFormat


class Colour(enum.Enum):
    red = "r"
    blue = "b"


@dataclass
class Paint:
    layers: int = 2
    """Coats."""
    from_: str | None = None
    """Shop that sells it."""


@dataclass
class Args:
    """Arguments of a tool."""

    source: Path
    """File to read."""
    from_: str = "start"
    """Place to begin at."""
    count: int = 3
    """Number
    of lines."""
    share: float = 0.5
    fast: bool = False
    colour: Colour = Colour.red
    """red or blue."""
    names: list[str] = field(default_factory=list)
    sizes: list[int] | None = None
    limit: int | None = 10
    paint: Paint = field(default_factory=Paint)


def parse(*words: str, places: tuple[str, ...] = ()) -> Args:
    return parse_args(Args, words, prog="graphmoe.tool", places=places)


def test_every_type_is_converted_defaults_stay_and_empty_values_are_values():
    words = "source=~/a count=-4 share=1e-3 fast=TRUE colour=blue names=a,b sizes=1,2 limit=none from=x=y"
    found = parse(*words.split())
    place = Path.home() / "a"
    assert found == Args(place, "x=y", -4, 1e-3, True, Colour.blue, ["a", "b"], [1, 2], None)
    assert parse("source=a") == Args(Path("a"))
    found = parse("source=a", "from=", "names=", "sizes=null", "fast=false", "limit=7", "paint.from=b")
    assert found == Args(Path("a"), from_="", limit=7, paint=Paint(from_="b"))


def test_a_key_is_given_in_three_forms_and_a_place_needs_none():
    words = "--source a --count -4 --share=0.25 --fast --names a b --sizes 1,2 --from here"
    found = parse(*words.split())
    assert found == Args(Path("a"), "here", -4, 0.25, True, Colour.red, ["a", "b"], [1, 2])
    assert parse("--fast", "source=a", "--fast=false").fast is False
    assert parse("--source", "a", "--fast", "false").fast is False
    found = parse("runs/a=b", "def f(a=1", "count=2", "c", "d", places=("source", "from", "names"))
    assert (found.source, found.from_, found.names) == (Path("runs/a=b"), "def f(a=1", ["c", "d"])


def test_a_wrong_word_is_named_with_what_would_do():
    wrong = {
        "--cuont": "unknown key 'cuont'; did you mean 'count'?",
        "zzzz=3": "unknown key 'zzzz'; valid: source, from, count",
        "from_=3": "unknown key 'from_'; did you mean 'from'?",
        "quick": "'quick' is not of the form key=value; keys: source, from, count, share, fast",
        "--count": "--count needs a value: count=...",
        "count=3.5": "count=3.5: expected a whole number",
        "--share=x": "share=x: expected a number",
        "fast=yes": "fast=yes: expected true or false",
        "colour=r": "colour=r: expected one of red, blue",
        "sizes=1,b": "sizes=1,b: expected a whole number",
    }
    for word, said in wrong.items():
        keys = re.escape("(python -m graphmoe.tool --help lists the keys)")
        with pytest.raises(ConfigError, match=rf"^[^\n]*{re.escape(said)}[^\n]*{keys}$"):
            parse("source=a", word)
    with pytest.raises(ConfigError, match=r"source=\.\.\. is required \(File to read\.\)"):
        parse("count=3")


def test_help_prints_each_key_with_default_and_documentation(capsys):
    for words in (("count=3", "--help"), ("-h",), ("help",)):
        with pytest.raises(SystemExit) as end:
            parse(*words)
        assert end.value.code == 0
        shown = capsys.readouterr().out
        assert shown.startswith("usage: python -m graphmoe.tool key=value ...\n")
        rows = [" ".join(line.split()) for line in shown.splitlines()[1:]]
        first = ["source=... File to read.", "from=start Place to begin at.", "count=3 Number of lines."]
        last = ["paint.layers=2 Coats.", "paint.from=... Shop that sells it."]
        assert rows[:3] == first and rows[-2:] == last and "colour=red red or blue." in rows
        assert len(rows) == 11


def test_a_file_to_write_is_in_a_folder_that_there_is_and_ends_as_it_should(tmp_path):
    def problems(name: str) -> list[str]:
        found = file_problems("page", tmp_path / name, "page.html")
        return [problem.replace(str(tmp_path), "T") for problem in found]

    assert problems("a.html") == problems("a.b.html") == []
    assert problems("a") == ["page=T/a must end in .html; use page=T/a.html"]
    assert problems("a.txt") == ["page=T/a.txt must end in .html; use page=T/a.html"]
    assert problems("") == ["page=T is a folder; name a file, such as page=T/page.html"]
    assert problems("no/a.png") == [
        "page=T/no/a.png must end in .html; use page=T/no/a.html",
        "page=T/no/a.png: there is no folder T/no; make it, or name another file",
    ]


def test_json_is_one_document_and_a_string_is_printed_as_it_is(capsys):
    emit({"a": [1]}, "ignored", OutputFormat.json)
    assert json.loads(capsys.readouterr().out) == {"a": [1]}
    text = "x[/b] [red]y[/red] :smile: " + "word " * 60  # markup, emoji and a long line to rich
    emit({}, text, OutputFormat.text)
    assert capsys.readouterr().out == text + "\n"


def test_an_error_of_a_disk_is_one_line(capsys):
    cases = [
        (OSError(28, "No space left on device", "a/b.html"), 1, "a/b.html: No space left on device"),
        (OSError(28, "No space left on device"), 1, "[Errno 28] No space left on device"),
        (PermissionError(13, "Permission denied", "a"), 2, "a: Permission denied"),
    ]
    for error, status, said in cases:
        with pytest.raises(SystemExit) as end:
            run_tool(Mock(side_effect=error), [])
        assert end.value.code == status and capsys.readouterr() == ("", f"error: {said}\n")


def test_an_error_cannot_move_the_cursor_and_a_line_of_it_can_be_read(capsys):
    print_error("two\nlines \x1b[2J\t\ud800 é")
    print_error("a" * 5000 + "b")
    err = capsys.readouterr().err
    assert err.startswith("error: two\nlines \\x1b[2J\\t\\ud800 é\nerror: aaa")
    assert err.endswith("aaab\n") and "...(5001 characters)..." in err and len(err) < 2000


@pytest.mark.parametrize("shown", ["'a\\n' * 100_000", "Group(*['a'] * 20_000)", "''"])
def test_a_reader_that_leaves_early_is_no_error(shown):
    code = f"""
from rich.console import Group
from graphmoe.config.arguments import OutputFormat, emit
emit(["a"] * 100_000, {shown}, OutputFormat.{"text" if "a" in shown else "json"})
"""
    with Popen([sys.executable, "-c", code], stdout=PIPE, stderr=PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
