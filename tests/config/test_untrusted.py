"""Files that anybody may have written: a wrong one is one line with path and field, and none runs code."""

import math
import os
import re
from typing import Any, NotRequired, TypedDict

import pytest

from graphmoe.config.untrusted import FileError, read_json, read_yaml


class Index(TypedDict):
    weight_map: dict[str, str]
    total: NotRequired[int | None]


def test_a_wrong_json_file_is_one_line_with_its_path_and_field(tmp_path):
    path = tmp_path / "index.json"
    wrong = {
        "[]": "expected object, found array",
        "{}": "missing required field weight_map",
        '{"weight_map": {"a": 1}}': "weight_map[...]: expected str, found int",
        '{"weight_map": {}, "total": 1.5}': "total: expected int | null, found float",
        "{": "is not JSON",
        "": "is not JSON",
        "[" * 100_000: "nested too deeply",
        '{"weight_map": {}, "total": ' + "9" * 5000 + "}": "4300 digits",
    }
    for text, said in wrong.items():
        path.write_text(text)
        with pytest.raises(FileError, match=rf"^{path}[^\n]*{re.escape(said)}[^\n]*$"):
            read_json(path, Index)


def test_a_file_is_read_if_it_is_regular_text_of_its_size_and_closed(tmp_path):
    path, before = tmp_path / "index.json", len(os.listdir("/proc/self/fd"))
    path.write_text('{"weight_map": {"a": "b"}, "other": NaN}')
    assert read_json(path, Index)["weight_map"] == {"a": "b"}
    assert math.isnan(read_json(path, dict[str, Any])["other"])
    with pytest.raises(FileError, match="at most 4 are read"):
        read_json(path, Index, largest_bytes=4)
    path.write_bytes(b'{"\xff": 1}')
    with pytest.raises(FileError, match="not UTF-8 text"):
        read_json(path, Index)
    os.mkfifo(tmp_path / "fifo")  # for which nobody waits
    for path in (tmp_path / "fifo", tmp_path, tmp_path / "absent", tmp_path / "null\0"):
        with pytest.raises(FileError, match="cannot be read|not a regular file|Is a directory"):
            read_json(path, Index)
    assert len(os.listdir("/proc/self/fd")) == before


def test_yaml_makes_no_objects_and_takes_no_aliases(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("a: &list [1, 2]\nb: [*list, *list]\n")
    with pytest.raises(FileError, match="aliases are not supported"):
        read_yaml(path, dict[str, Any])
    wrong = ["a: !!bool x", "a: !!int ''", "a: !!timestamp x", "a: ! x", "a: 0x_", "a: 2001-99-99"]
    for text in [*wrong, "a: !!python/object/apply:os.mkdir ['ran']", "[" * 100_000]:
        path.write_text(text)
        with pytest.raises(FileError, match=rf"^{path} is not YAML: [^\n]+$"):
            read_yaml(path, dict[str, Any])
    path.write_text("a: '*.py'\nb: x * y\n")
    assert read_yaml(path, dict[str, Any]) == {"a": "*.py", "b": "x * y"}
