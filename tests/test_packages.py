"""Wheel, editable install and checkout run alike, beside files of a user with the names of our folders."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

from graphmoe.__main__ import main
from tests.runs import ROOT, TINY

pytestmark = pytest.mark.slow

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
ALONE = ("--no-build-isolation", "--no-deps")
START = """import site, sys
def is_finder(name): return name.startswith("__editable___graphmoe")
sys.meta_path[:] = [each for each in sys.meta_path if not is_finder(getattr(each, "__module__", ""))]
for name in [*filter(is_finder, sys.modules)]: del sys.modules[name]
sys.path.insert(0, {site!r})
site.addsitedir({site!r})
"""
"""Startup file that finds an editable install in a folder before the one that this environment may have."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    copy = tmp_path_factory.mktemp("checkout") / "tree"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\n")[:-1]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP, "wheel", *ALONE, "-w", folder, checkout], check=True)
    (built,) = folder.glob("*.whl")
    zipfile.ZipFile(built).extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def editable(checkout, tmp_path):
    """Install into a prefix, whose finder a startup file of Python's loads; what is installed here stays."""
    apart = ("--ignore-installed", "--prefix", tmp_path / "prefix")
    subprocess.run([*PIP, "install", *ALONE, *apart, "-e", checkout], check=True)
    site = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "prefix")})
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(START.format(site=site))
    return tmp_path / "start"


@pytest.mark.parametrize("install", ["checkout", "wheel", "editable"])
def test_commands_run_beside_a_users_files_of_our_folders_names(install, checkout, request, tmp_path):
    path = request.getfixturevalue(install)
    environment = {**os.environ, "PYTHONPATH": str(path), "GRAPHMOE_CACHE": str(tmp_path / "cache")}
    work = tmp_path / "work"
    for name in ("runtime.py", "passes/__init__.py", "conf/__init__.py", "conf/config.yaml"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("raise RuntimeError('this is the file of the user')\n")

    def run(*words):
        line = [sys.executable, *words]
        done = subprocess.run(line, cwd=work, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    here = run("-c", "import graphmoe.runtime.ranks, graphmoe.passes as p; print(p.__file__)")
    assert {path, checkout} & {*Path(here).parents}
    assert json.loads(run("-m", "graphmoe.info", "model=moonlight_16b", "format=json"))
    assert json.loads(run("-m", "graphmoe", "info", "moonlight_16b", "--format=json"))
    run("-m", "graphmoe.train", *TINY, "train.steps=2", "hydra.run.dir=run")
    assert json.loads((work / "run" / "summary.json").read_text())["steps"] == 2


def test_a_wheel_brings_one_name_and_all_options(wheel):
    names = {path.name for path in wheel.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"graphmoe"}
    options = {path.relative_to(ROOT / "conf") for path in (ROOT / "conf").rglob("*.yaml")}
    assert options == {path.relative_to(wheel / "graphmoe/conf") for path in wheel.rglob("*.yaml")}


def test_a_wheel_has_types_and_a_license_and_extras_for_optional_packages(wheel):
    (found,) = distributions(path=[str(wheel)])
    assert (wheel / "graphmoe/py.typed").is_file() and found.metadata["License-Expression"] == "Apache-2.0"
    (license,) = [file for file in found.files or () if file.name == "LICENSE"]
    assert "Apache License" in license.read_text()
    extras = {"hf", "te", "turbo", "wandb", "mlflow", "slurm", "sweeps", "dev"}
    assert extras <= {*found.metadata.get_all("Provides-Extra")}
    assert [(script.name, script.load()) for script in found.entry_points] == [("graphmoe", main)]
