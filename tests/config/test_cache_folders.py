"""Folders of caches without a home folder, as for a user id that a container does not know."""

import pwd

import pytest

from graphmoe.config.schema import ConfigError, cache_root


@pytest.fixture
def homeless(monkeypatch):
    def unknown(user):
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("GRAPHMOE_CACHE", raising=False)


def test_without_a_home_folder_the_error_names_what_to_set(homeless, monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="no home folder .*; set HOME, or GRAPHMOE_CACHE="):
        cache_root()
    monkeypatch.setenv("GRAPHMOE_CACHE", str(tmp_path))
    assert cache_root() == tmp_path


def test_a_folder_that_is_named_needs_no_home(homeless, tmp_path):
    assert cache_root(str(tmp_path / "own")) == tmp_path / "own"
