"""The console command, and what all commands answer before torch is imported."""

import json
import subprocess
import sys

import pytest

from graphmoe import __version__
from graphmoe.__main__ import main
from graphmoe.config.arguments import COMMANDS
from tests.runs import ROOT
from tests.test_house import COMMANDS as HOUSE_COMMANDS

WORDS = (["--help"], ["--version"], ["--no-such-key=3"])
WITH_MODEL = [(name, ["model=deepseek_v3", "--help"]) for name in ("train", "info", "project")]
ASK = """
import contextlib, json, sys, tempfile
from graphmoe.__main__ import main
answers = []
for name, words in json.loads(sys.argv[1]):
    sys.argv = ["graphmoe", name, *words]
    out, err, status = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+"), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
    texts = [file.seek(0) or file.read() for file in (out, err)]
    answers.append((name, words, status, *texts, "torch" in sys.modules))
print(json.dumps(answers))
"""


@pytest.fixture
def answer(monkeypatch, capsys):
    def answer(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["/usr/bin/graphmoe", *words])
        try:
            main()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        return status, *capsys.readouterr()

    return answer


def test_help_versions_and_typos_of_each_command_import_no_torch():
    asked = [*((name, words) for name in COMMANDS for words in WORDS), *WITH_MODEL]
    line = [sys.executable, "-c", ASK, json.dumps(asked)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    for name, words, status, out, err, with_torch in json.loads(done.stdout):
        assert not with_torch, (name, words)
        if "--help" in words:
            assert status == 0 and err == "" and f"graphmoe {name}" in out, name
            assert name == "worker" or COMMANDS[name] in out, name
            assert words == ["--help"] or "  model.num_layers=61 " in out, name
        elif words == ["--version"]:
            assert status == 0 and out.startswith(f"graphmoe {__version__} (torch 2."), name
        else:
            assert status == 2 and out == "" and err.startswith("error: "), (name, err)
            assert err.count("\n") == 1 and (name == "worker" or "no_such_key" in err), err


def test_the_console_command_lists_all_commands_and_names_the_nearest(answer):
    assert COMMANDS.keys() == HOUSE_COMMANDS - {"__main__", "api"}
    for words in ((), ("--help",), ("help",)):
        status, out, err = answer(*words)
        assert (status, err) == (0, "")
        assert all(f"  {name:<15}{line}" in out for name, line in COMMANDS.items())
    assert answer("trian") == (2, "", "error: there is no command 'trian'; did you mean 'train'?\n")
    assert answer("--version")[1].startswith(f"graphmoe {__version__} ")


def test_a_command_by_its_name_does_what_its_module_does(answer, tmp_path):
    status, out, err = answer("pipeline_view", "1f1b", "--stages", "2", "--format=json")
    assert status == 0 and err == "" and json.loads(out)
    status, _, err = answer("report", str(tmp_path / "none"))
    assert status == 2 and str(tmp_path / "none") in err
    assert answer("convert", "--help")[1].startswith("usage: graphmoe convert [from] [to] key=value ...\n")
    said = answer("cache", "--acton=list")[2]
    assert said.endswith("did you mean 'action'? (graphmoe cache --help lists the keys)\n")
