"""Files of a run on a disk that may be full."""

from __future__ import annotations

import pytest

from graphmoe.runtime.host.files import LineFile, dispensable, replace_text
from tests.faulty_disk import no_file_beyond


def test_lines_that_a_full_disk_does_not_take_are_lost_whole_counted_and_told_once(tmp_path):
    path, told = tmp_path / "rows", list[str]()
    file = LineFile(path, told.append)
    file.append(["first", "second"])
    with no_file_beyond(16):  # three bytes of the next
        file.append(["third"])
        file.append(["fourth", "fifth"])
    assert path.read_text() == "first\nsecond\n"
    file.append(["sixth"])
    file.close()
    assert path.read_text() == "first\nsecond\nsixth\n"
    first, again = told
    assert first == f"{path} takes no more lines (File too large): they are lost, and the run goes on"
    assert again == f"{path} takes lines again; lost are 3"


def test_lines_lost_at_the_end_are_told_when_the_file_is_closed(tmp_path):
    told = list[str]()
    file = LineFile(tmp_path / "rows", told.append)
    with no_file_beyond(3):
        file.append(["first"])
        file.close()
    assert told[1:] == [f"{tmp_path / 'rows'} lacks the last lines, 1 of them"]


def test_a_line_after_a_torn_one_begins_at_its_own(tmp_path):
    (tmp_path / "rows").write_text('{"step": 1}\n{"st')
    file = LineFile(tmp_path / "rows")
    file.append(['{"step": 2}'])
    file.append(['{"step": 3}'])
    assert (tmp_path / "rows").read_text() == '{"step": 1}\n{"st\n{"step": 2}\n{"step": 3}\n'


def test_a_file_that_could_not_be_replaced_stays_and_its_draft_takes_no_room(tmp_path, caplog):
    path = tmp_path / "page.html"
    replace_text(path, "old")
    with no_file_beyond(10), dispensable(path):
        replace_text(path, "new" * 10)
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"] and path.read_text() == "old"
    assert caplog.messages == [f"{path} is not written (File too large); the run goes on"]
    with pytest.raises(ValueError), dispensable(path):
        raise ValueError
