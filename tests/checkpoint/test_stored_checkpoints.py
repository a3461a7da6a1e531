"""Checkpoints of step 3 that earlier versions saved, with `TINY` in bf16: a run goes on from them."""

import tarfile

import pytest

from graphmoe.checkpoint.folders import _FORMAT
from tests.runs import ROOT, metrics, train_in

STORED = ROOT / "tests" / "checkpoint" / "stored"
LOSSES = {  # of steps 4 to 6 of the version that saved it, which computed some sums in another order
    "2026-11-21": (4.162184238433838, 4.157222747802734, 4.162691116333008),
    "2026-11-27": (4.160687446594238, 4.157914161682129, 4.1634416580200195),
    "2026-11-30": (4.160687446594238, 4.157914161682129, 4.1634416580200195),  # format 2
}


@pytest.mark.parametrize("date", LOSSES)
def test_a_run_goes_on_from_a_checkpoint_of_an_earlier_version(tmp_path, date):
    with tarfile.open(STORED / f"{date}.tar.xz") as archive:
        archive.extractall(tmp_path / "checkpoints", filter="data")
    source = f"checkpoint.resume_from={tmp_path / 'checkpoints' / 'step_00000003'}"
    train_in(tmp_path / "run", "precision.compute=bf16", source)
    found = [row["loss"] for row in metrics(tmp_path / "run") if "loss" in row]
    assert found == pytest.approx(LOSSES[date], abs=1e-4, rel=0)


def test_each_format_has_a_stored_checkpoint():
    assert {path.name.removesuffix(".tar.xz") for path in STORED.iterdir()} == {*LOSSES}
    assert _FORMAT == 2, "store a checkpoint of the new format here too"
