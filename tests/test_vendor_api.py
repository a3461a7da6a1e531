"""The script that updates recorded signatures: re-exports, methods, changes and missing names."""

import json

from tests.vendor_api import record

SOURCES = {
    "lib/__init__.py": "from lib.inner import *\nfrom .inner.deep import Wide as Buffer, gone\n",
    "lib/inner/__init__.py": "from .deep import run\n",
    "lib/inner/deep.py": (
        "raise SystemExit\n"
        "def run(x, /, scale=2 * 3, *, how='a', flag): ...\n"
        "class Wide:\n    def send(self, rows, to=None): ...\n"
    ),
}


def test_signatures_are_recorded_from_sources_that_are_not_run(tmp_path):
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    kept = {"params": [["rows", None], ["to", "None"]]}
    document = {
        "commit": "old",
        "functions": {"lib.run": {"params": [["x", None]], "doc": "kept"}, "lib.gone": {"params": []}},
        "classes": {"lib.Buffer": {"methods": {"send": kept, "get": {"params": []}}}},
    }
    (tmp_path / "some.json").write_text(json.dumps(document))
    params = [["x", None], ["scale", "2 * 3"], ["how", "'a'"], ["flag", None]]
    said = [*record("some", tmp_path, "new", tmp_path)]
    assert said == [f"lib.run: [['x', None]] -> {params}", "lib.gone is gone", "lib.Buffer.get is gone"]
    found = json.loads((tmp_path / "some.json").read_text())
    assert found["commit"] == "new"
    assert found["functions"]["lib.run"] == {"params": params, "doc": "kept", "keyword_only": ["how", "flag"]}
    assert found["classes"]["lib.Buffer"]["methods"]["send"] == kept | {"keyword_only": []}
