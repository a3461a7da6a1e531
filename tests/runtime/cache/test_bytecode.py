"""Bytecode of packages that were installed without: kept in the compile cache, and nowhere else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphmoe.runtime.cache.bytecode import PREFIX

RUN = """
import sys
from pathlib import Path
from graphmoe.runtime.cache.bytecode import folder_in_use, keep_bytecode
{before}
keep_bytecode(Path(sys.argv[1]))
import torch
print(torch.NAME, folder_in_use(), torch.__cached__)
"""
NAME = "NAME = 'source'\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of installed packages without bytecode, with small ones named torch and sympy."""
    folder = tmp_path / "site"
    for package in ("torch", "sympy"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text(NAME)
        (folder / f"{package}-1.0.dist-info").mkdir()
    return folder


def run(site: Path, cache: Path, before: str = "", **variables: str) -> tuple[str, str, str]:
    """The value that ``torch`` has in a new process, where bytecode is kept, and the file of its own."""
    environment = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"} | variables
    environment["PYTHONPATH"] = f"{site}:{Path(__file__).parents[3]}"
    words = [sys.executable, "-c", RUN.format(before=before), str(cache)]
    found = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, cwd=site)
    value, folder, file = found.stdout.split()
    return value, folder, file


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "bytecode").rglob("torch/*.pyc"))


def test_bytecode_is_written_once_and_read_by_the_next_process(site, tmp_path):
    value, folder, file = run(site, tmp_path / "cache")
    assert value == "source" and Path(folder).parent == tmp_path / "cache" / "bytecode"
    assert (tmp_path / "cache" / "CACHEDIR.TAG").exists()  # or the tool would not prune it
    assert kept(tmp_path / "cache") == [Path(file)] and not list(site.rglob("*.pyc"))
    code = Path(file).read_bytes()
    Path(file).write_bytes(code.replace(b"source", b"cached"))  # shows who reads it
    assert run(site, tmp_path / "cache") == ("cached", folder, file)


def test_another_version_has_a_folder_of_its_own_though_times_and_sizes_are_the_same(site, tmp_path):
    source, cache = site / "torch" / "__init__.py", tmp_path / "cache"
    os.utime(source, (1e9, 1e9))
    first = run(site, cache)
    source.write_text(NAME.replace("source", "update"))
    os.utime(source, (1e9, 1e9))
    (site / "torch-1.0.dist-info").rename(site / "torch-1.1.dist-info")
    second = run(site, cache)
    assert (first[0], second[0]) == ("source", "update") and first[1] != second[1]
    source.write_text("NAME = 'longer_source'\n")  # of the same version
    assert run(site, cache)[:2] == ("longer_source", second[1])


@pytest.mark.parametrize(
    "case", ["has it", "may be written", "the user's place", "imported already", "no folder"]
)
def test_nothing_changes_where_it_is_not_needed_or_cannot_be(site, tmp_path, case):
    variables, before = {}, ""
    if case == "has it":
        subprocess.run([sys.executable, "-m", "compileall", "-q", str(site)], check=True)
    elif case == "may be written":
        variables["PYTHONDONTWRITEBYTECODE"] = ""
    elif case == "the user's place":
        variables[PREFIX] = str(tmp_path / "mine")
    elif case == "imported already":
        before = "import torch"
    else:
        (tmp_path / "cache").write_text("a file")
    value, folder, file = run(site, tmp_path / "cache", before, **variables)
    assert (value, folder) == ("source", "None") and not (tmp_path / "cache" / "bytecode").exists()
    assert file.startswith(str(tmp_path / "mine" if case == "the user's place" else site))
