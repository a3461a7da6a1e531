"""The tool that lists, verifies and prunes the compile cache."""

import json
import os
import re
import time
from functools import partial

import pytest

from graphmoe import cache as tool
from graphmoe.config.arguments import parse_size
from graphmoe.config.schema import ConfigError, RunConfig
from graphmoe.plan.rules import resolve
from graphmoe.runtime.cache.key import key_of
from graphmoe.runtime.cache.store import CompileCache
from tests.damage import dead_pid
from tests.runs import document_of, refusal
from tests.runtime.cache.cache_contents import empty_cache

FACTS = {"base.device": "GPU", "graph.scope": ["attn", "mlp"], "model.top_k": 2}


@pytest.fixture
def cache(tmp_path, monkeypatch) -> CompileCache:
    """Three entries of 100 + 30, 100 + 20 and 40 bytes, the first 100 in common; the first was used last."""
    store = empty_cache(tmp_path, monkeypatch)
    keep(store, 1, "both", "c" * 30)
    keep(store, 2, "both", "b" * 20)
    keep(store, 3, None, "a" * 40)
    return store


def keep(store: CompileCache, number: int, common: str | None, own: str, model: str = "model") -> str:
    """Publish an entry, last used so many hours before yesterday, with old files."""
    work = store.open(facts(number))
    folder = work.path / "inductor"
    for path in folder.iterdir():  # what another entry has lent
        path.unlink()
    if common:
        (folder / "common.so").write_text("x" * 100)
    (folder / "own.so").write_text(own)
    work._files.clear()
    work.publish({"model": model, "graphs": number})
    work.close()
    folder, then = store.entries.folder(key(number)), time.time() - 3600 * number - 86400
    for path in folder.glob("*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"created": then}))
    (folder / "used").touch()
    os.utime(folder / "used", (then, then))
    return work.key


def facts(number: int) -> dict:
    return FACTS | {"model.num_experts": number}


def key(number: int) -> str:
    return key_of(facts(number))


def run(store: CompileCache, capsys, *words: str) -> dict:
    return document_of(tool.main, capsys, *words, f"cache_dir={store.folder}")


def sizes(store: CompileCache) -> list[int]:
    return sorted(blob.num_bytes for blob in store.blobs)


def test_the_list_has_entries_with_the_newest_use_first(cache, capsys):
    document = run(cache, capsys)
    assert document["total_bytes"] == 190 and document["cache_dir"] == str(cache.folder)
    rows = document["entries"]
    found = [(row["key"], row["bytes"], row["shared_bytes"]) for row in rows]
    assert found == [(key(1), 130, 100), (key(2), 120, 100), (key(3), 40, 0)]
    facts = {"model": "model", "graphs": 1, "files": 2, "device": "GPU", "scope": ["attn", "mlp"]}
    assert facts.items() <= rows[0].items()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", rows[0]["last_used"])


def test_entries_that_look_alike_say_what_differs(cache, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    for number in (4, 5):
        keep(cache, number, None, "z" * number, model="tiny")
    tool.main([f"cache_dir={cache.folder}"])
    rows = [line for line in capsys.readouterr().out.splitlines() if "tiny on GPU" in line]
    assert ["changed" in row for row in rows] == [False, True]
    assert "scope [attn,mlp]; model.num_experts changed: 4 -> 5" in rows[1]


@pytest.mark.parametrize("made", [False, True], ids=["no folder", "empty folder"])
def test_before_any_run_the_cache_of_runs_is_empty(tmp_path, monkeypatch, capsys, made):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GRAPHMOE_CACHE", "~/somewhere")
    folder = tmp_path / "somewhere" / "compiled"
    if made:
        folder.mkdir(parents=True)
    assert resolve(RunConfig()).compile.cache_dir == str(folder)
    found = partial(document_of, tool.main, capsys)
    assert found() == {"cache_dir": str(folder), "total_bytes": 0, "entries": []}
    assert found("action=verify") == {"files": 0, "damaged": [], "lacking": {}}
    assert found("action=prune", "max_size=0")["bytes_before"] == 0
    tool.main([])
    assert "0 entries, 0 B in all" in capsys.readouterr().out


def test_verify_sets_damage_aside_names_it_and_ends_with_status_1(cache, capsys):
    digest = cache.entries.read(key(1)).files["inductor/common.so"]
    cache.blobs.path(digest).write_text("y" * 100)
    with pytest.raises(SystemExit) as ended:
        run(cache, capsys, "action=verify")
    assert ended.value.code == 1
    document = json.loads(capsys.readouterr().out)
    lacking = {key(1): ["inductor/common.so"], key(2): ["inductor/common.so"]}
    assert document == {"files": 4, "damaged": [digest], "lacking": lacking}
    assert run(cache, capsys, "action=verify") == {"files": 3, "damaged": [], "lacking": {}}
    work = cache.open(facts(1))
    assert (work.found, work.num_files, work.damaged) == (True, 1, [])
    work.close()


def test_prune_removes_the_entries_used_least_recently_and_what_only_they_had(cache, capsys):
    left, there = {0: [20, 30, 40, 100], 1: [20, 30, 100], 2: [30, 100], 3: []}, [1, 2, 3]
    for max_size, count in {None: 0, "190B": 0, "189B": 1, "0.15KB": 1, "149B": 2, "0": 3}.items():
        before, total = sizes(cache), 3 - count
        document = run(cache, capsys, "action=prune", *([f"max_size={max_size}"] if max_size else []))
        assert document["entries"] == [key(number) for number in reversed(there[total:])]
        assert sizes(cache) == left[count] and document["files"] == len(before) - len(left[count])
        assert (document["bytes_before"], document["bytes_after"]) == (sum(before), sum(left[count]))
        there = there[:total]
        assert [row["key"] for row in run(cache, capsys)["entries"]] == [key(n) for n in there]


def test_prune_removes_what_nobody_needs_and_leaves_young_files(cache, capsys):
    cache.blobs.put(b"young" * 10)  # which a job may be about to name
    old = cache.blobs.path(cache.blobs.put(b"old" * 20))
    draft, dead = old.parent / "torn.0.draft", f"{os.uname().nodename}-{dead_pid()}-ab"
    draft.write_text("")
    (cache.folder / "work" / dead).mkdir()
    for path in (old, draft, cache.folder / "work" / dead):
        os.utime(path, (0, 0))
    (cache.folder / "damaged").mkdir()
    (cache.folder / "damaged" / "blob").write_text("x" * 7)
    document = run(cache, capsys, "action=prune")
    assert (document["files"], document["waiting_bytes"]) == (1, 50)
    assert (document["damaged"], document["work_folders"]) == (1, [dead])
    assert (document["bytes_before"], document["bytes_after"]) == (190 + 50 + 60 + 7, 190 + 50)
    assert sizes(cache) == [20, 30, 40, 50, 100] and not list(cache.folder.rglob("*.draft"))
    assert not (cache.folder / "work" / dead).exists() and not list(cache.folder.glob("damaged/*"))


def test_a_job_whose_entry_is_pruned_while_it_runs_keeps_its_code_again(cache, capsys, caplog):
    work = cache.open(facts(1))
    run(cache, capsys, "action=prune", "max_size=0")
    assert list(cache.blobs) == []
    work.publish()
    work.close()
    assert sizes(cache) == [30, 100] and caplog.text == ""


def test_a_size_is_a_number_with_a_unit_and_for_prune_alone(cache):
    sizes = {"20GB": 20 * 10**9, "20GiB": 20 * 2**30, "500 mb": 5 * 10**8, "1.5KiB": 1536, "7B": 7, "0": 0}
    assert {text: parse_size("max_size", text) for text in sizes} == sizes
    for text in ("20", "GB", "-1GB", "20XB", "1,5GB", "", 400 * "9" + "GB"):
        with pytest.raises(ConfigError, match=f"max_size={text} is not a size.*TB, KiB.*e.g. max_size=20GB"):
            parse_size("max_size", text)
    with pytest.raises(ConfigError, match="max_size=1GB is for action=prune, not action=verify"):
        tool.main(["action=verify", "max_size=1GB", f"cache_dir={cache.folder}"])


def test_a_folder_that_is_no_cache_is_left_alone(tmp_path, capsys):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "mine").write_text("")
    error = refusal(tool.main, capsys, "action=prune", f"cache_dir={tmp_path}")
    assert "is not a compile cache: it has no CACHEDIR.TAG" in error
    assert (tmp_path / "damaged" / "mine").exists()
    with pytest.raises(ConfigError, match="mine is not a compile cache"):
        tool.main([f"cache_dir={tmp_path}/damaged/mine"])


def test_prune_leaves_a_file_that_was_stored_again_meanwhile(cache):
    blob = next(blob for blob in cache.blobs if blob.num_bytes == 40)
    os.utime(cache.blobs.path(blob.digest), (0, 0))
    listed = next(blob for blob in cache.blobs if blob.num_bytes == 40)
    cache.blobs.put(b"a" * 40)
    assert not cache.blobs.remove(listed) and cache.blobs.has(blob.digest)


@pytest.mark.parametrize("action", ["prune", "verify"])
@pytest.mark.parametrize("place", ["blobs", "blobs/aa", "entries", "damaged", "work", "choices"])
def test_a_link_in_the_cache_is_refused_and_not_followed(cache, tmp_path, place, action):
    mine = tmp_path / "mine" / ("a" * 64)
    mine.parent.mkdir()
    mine.write_text("a thesis")
    os.utime(mine, (1, 1))
    link = cache.folder / place
    if link.exists():
        link.rename(link.with_name("aside"))
    link.symlink_to(mine.parent)
    with pytest.raises(ConfigError, match=f"^{link} is a link to .*rm {link}$"):
        tool.main([f"action={action}", f"cache_dir={cache.folder}"])
    assert mine.read_text() == "a thesis"


def test_only_stored_files_are_pruned(cache):
    strange = [cache.folder / "blobs" / name for name in ("aa/notes.txt", f"aa/{'b' * 64}", f"ab/{'A' * 64}")]
    for path in strange:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
        os.utime(path, (1, 1))
    tool.main(["action=prune", "max_size=0", f"cache_dir={cache.folder}"])
    assert all(path.exists() for path in strange) and not [*cache.blobs]
