"""Rows of a suite are kept as soon as they are there, for one that ends early."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from graphmoe.bench import __main__ as bench
from graphmoe.bench.one_by_one import keep, one_by_one


@dataclass
class Named:
    name: str


@dataclass
class Row:
    case: str
    samples_ms: list[float]
    error: str | None = None


def run(case: Named) -> list[Row]:
    if case.name == "killed":
        raise KeyboardInterrupt
    return [Row(case.name, [1.0, 2.0]), Row(f"{case.name} again", [3.0])]


def kept(out: Path) -> list[Row]:
    return [Row(**json.loads(line)) for line in out.with_name("ops.rows.jsonl").read_text().splitlines()]


def test_what_ends_early_leaves_the_rows_before_it(tmp_path):
    out = tmp_path / "ops.json"
    cases = [Named("first"), Named("second"), Named("killed"), Named("never")]
    with pytest.raises(KeyboardInterrupt):
        one_by_one(cases, run, str, out)
    assert kept(out) == [*run(cases[0]), *run(cases[1])] and not out.exists()


def test_the_other_ranks_keep_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert one_by_one([Named("first")], run, str, tmp_path / "ops.json") == run(Named("first"))
    assert not [*tmp_path.iterdir()]


def test_without_a_document_to_write_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one_by_one([Named("first")], run, str, None)
    assert not [*tmp_path.iterdir()]


def test_rows_that_cannot_be_kept_are_a_warning(tmp_path, caplog):
    keep(tmp_path / "gone" / "ops.json", [Row("first", [])])
    assert "rows are not kept meanwhile" in caplog.text and "ops.rows.jsonl" in caplog.text


def test_a_suite_that_begins_forgets_what_an_earlier_one_left(tmp_path, monkeypatch):
    out = tmp_path / "ops.json"
    keep(out, [Row("of an earlier suite", [])])
    monkeypatch.setattr(bench, "ops_suite", lambda *_: ([Named("first"), Named("killed")], []))
    monkeypatch.setattr(bench, "run_case", lambda case, *_: run(case))
    monkeypatch.setattr(bench, "free_memory", lambda *_, **__: None)
    monkeypatch.setattr(bench, "brief", str)
    with pytest.raises(KeyboardInterrupt):
        bench.main(["device=cpu", f"out={out}"])
    assert kept(out) == run(Named("first"))
