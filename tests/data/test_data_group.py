"""The files of conf/data."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from graphmoe.config.schema import DataConfig, DataSource

GROUP = Path(__file__).parents[2] / "conf" / "data"


def test_every_source_has_a_file():
    assert {path.stem for path in GROUP.glob("*.yaml")} == {source.value for source in DataSource}


@pytest.mark.parametrize("source", list(DataSource))
def test_a_file_sets_its_source_and_shows_a_command(source):
    path = GROUP / f"{source.value}.yaml"
    merged = OmegaConf.merge(OmegaConf.structured(DataConfig), OmegaConf.load(path))
    assert merged.source is source
    assert f"#   python -m graphmoe.train data={source.value}" in path.read_text()
