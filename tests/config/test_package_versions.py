"""Versions of packages with wrong results on a GPU: each key refuses them."""

import pytest
import torch

from graphmoe.config import packages
from graphmoe.config.choices import AttentionBackend
from graphmoe.config.ranges import ConfigError
from graphmoe.ops.attention import choose_backend
from graphmoe.ops.grouped_mlp.vendor import TURBO, TURBO_FP8
from graphmoe.runtime.dispatch import check_package
from tests.runs import config

ATTENTION = {"is_rocm": True, "head_dim": 128, "v_head_dim": 128}
CHECKS = {  # what a run calls for each key
    "model.attention_backend": lambda: choose_backend(AttentionBackend.turbo, "cuda", **ATTENTION),
    "moe.experts": lambda: TURBO._products(torch.bfloat16),
    "moe.experts in fp8": lambda: TURBO_FP8["rowwise"]._products(torch.bfloat16),
    "moe.dispatcher": lambda: check_package("turbo", "cuda"),
}
REFUSED = [({"gfx950"}, "0.6.1"), ({"gfx942", "gfx950"}, "0.7.0.dev3"), ({"gfx950"}, None)]
TAKEN = [({"gfx950"}, "0.7.0"), ({"gfx950"}, "0.10.0+rocm7.2"), ({"gfx942"}, "0.6.1"), (set(), "0.6.1")]


@pytest.mark.parametrize("key", CHECKS)
@pytest.mark.parametrize(("gpus", "version"), REFUSED + TAKEN)
def test_turbo_with_races_is_refused_on_gfx950(key, gpus, version, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(packages, "is_installed", lambda name: True)
    monkeypatch.setattr(packages, "amd_gpus", lambda: gpus)
    monkeypatch.setattr(packages, "version_of", lambda distribution: version)
    key, run = key.partition(" ")[0], CHECKS[key]
    asked, wanted, (section, name) = f"{key}=turbo", config(), key.split(".")
    setattr(getattr(wanted, section), name, "turbo")
    lines = [*packages.missing_packages(wanted)]  # at the start, before torch is imported
    if (gpus, version) in TAKEN:
        run()
        assert not lines
        return
    with pytest.raises(ConfigError) as error:
        run()
    (line,), said = lines, f"{asked} needs primus-turbo 0.7 or newer on gfx950: {version or 0} is installed"
    assert line.startswith(said) and str(error.value).startswith(said)
    assert "pip install -U " in line and line.endswith(f"or use {key}=auto")


def test_architectures_are_those_of_the_driver(tmp_path):
    for version in (0, 90402, 90500, 90010, 120500):
        (tmp_path / f"{version}").mkdir()
        (tmp_path / f"{version}/properties").write_text(f"simd_count 0\ngfx_target_version {version}\n")
    (tmp_path / "5/properties").mkdir(parents=True)  # cannot be read
    assert packages.amd_gpus(tmp_path) == {"gfx942", "gfx950", "gfx90a", "gfx1250"}
