"""Compiled training: every pass alone and all of them give the losses of the plain model."""

import html
import json
import re

import pytest
import torch

from graphmoe.config.schema import ConfigError
from graphmoe.passes import PASSES
from graphmoe.report.page import compile_section
from graphmoe.report.run_data import read_run
from graphmoe.runtime.compile.report import REPORT_FILE
from graphmoe.runtime.host.logs import FILE_ONLY
from tests.runs import COMPILED_MODEL, assert_same_runs, metrics, train_in, trainer_in

FUSIONS = [spec.name for spec in PASSES if spec.stage == "forward" and not spec.optional]
EXPERTS = ["fuse_permutation", "fuse_activation", "fuse_experts"]  # the last joins what the others made
ALONE = [[name] for name in FUSIONS if name != "fuse_experts"]
STEPS = ("train.steps=50", "train.val_interval=25", "checkpoint.interval=0", "optim.lr=3e-3")
STEPS = (*STEPS, "model.mtp_depth=1", *COMPILED_MODEL)
COMPILED = ("compile.enabled=true",)
UNVALIDATED = (*COMPILED, "train.val_batches=0")
"""Words for no graphs of a forward alone, which take a third of the time."""


def losses(folder, *overrides: str) -> list[float]:
    train_in(folder, *STEPS, *overrides)
    return [row[key] for key in ("loss", "val_loss") for row in metrics(folder) if key in row]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> list[float]:
    return losses(tmp_path_factory.mktemp("plain") / "run")


def assert_within(one: list[float], other: list[float], limit: float) -> None:
    assert len(one) == len(other)
    worst = max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))
    assert worst <= limit, worst


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
def test_all_passes_have_the_losses_of_the_plain_model(tmp_path, plain):
    assert len(plain) == 50 + 3
    assert_within(losses(tmp_path / "run", *COMPILED), plain, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["as_traced", pytest.param("unmeasured", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("enabled", [[], EXPERTS, *ALONE], ids=str)
def test_some_passes_have_the_losses_of_the_plain_model(request, tmp_path, plain, enabled, way):
    request.getfixturevalue(way)
    words = (*UNVALIDATED, f"compile.cache={way != 'as_traced'}", f"passes.enabled=[{','.join(enabled)}]")
    assert_within(losses(tmp_path / "run", *words), plain[:50], 1e-3)


@pytest.mark.slow
def test_the_report_of_a_run_counts_graphs_caches_and_matches(tmp_path):
    train_in(tmp_path / "run", *COMPILED, *COMPILED_MODEL, "train.steps=2", "passes.dump=true")
    report = json.loads((tmp_path / "run" / REPORT_FILE).read_text())
    assert report["breaks"] == report["recompiled"] == 0
    assert report["cache"]["fx_bypasses"] == report["cache"]["aot_bypasses"] == 0
    assert report["graphs"] == sum(unit["graphs"] for unit in report["units"]) > 8
    for name in FUSIONS:
        row = report["passes"][name]
        assert row["matches"] > 0 and row["nodes_after"] < row["nodes_before"] and row["ms"] > 0, name
        assert row["saved_bytes_after"] is not None, name
    experts = report["passes"]["fuse_experts"]
    assert experts["saved_bytes_after"] < experts["saved_bytes_before"]
    dumped = {path.name.split(".")[-3] for path in (tmp_path / "run" / "graphs").iterdir()}
    assert dumped >= set(FUSIONS)


def test_the_log_file_and_the_page_have_what_was_compiled(tmp_path, as_traced, caplog):
    caplog.set_level("INFO")
    train_in(tmp_path, *COMPILED, *COMPILED_MODEL, "train.steps=1", "compile.cache=false")
    of_file = [record for record in caplog.records if FILE_ONLY.items() <= vars(record).items()]
    text = "\n".join(record.getMessage() for record in of_file)
    for name in ("compiled units", "attn..moe_combine", "kept for backward", *FUSIONS):
        assert name in text, name
    page = compile_section(read_run(tmp_path))
    rows = re.findall(r"│ (\w+) +│ +([\d of]+?) +│ +(\d+ -> \d+) +│ +(\S.*?) +│", text)
    assert {name for name, *_ in rows} >= set(FUSIONS)
    for cells in rows:
        assert "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) in re.sub("<td[^>]*>", "<td>", page)


@pytest.mark.slow
def test_units_to_come_are_counted_before_the_first_is_compiled(tmp_path, as_traced):
    cases = {(): 5, ("train.val_batches=0",): 5, ("model.num_dense_layers=0",): 4}
    for number, (words, count) in enumerate(cases.items()):
        run = train_in(tmp_path / str(number), *COMPILED, "compile.cache=false", "train.steps=1", *words)
        compiled = run.execution.compiled
        assert compiled is not None and compiled.num_expected == len(compiled.reports) == count, words


def test_keys_that_do_nothing_are_named(tmp_path, caplog, as_traced):
    trainer_in(tmp_path / "eager", "moe.experts=triton", "passes.dump=true", "passes.disabled=[fuse_loss]")
    words = (*COMPILED, "compile.cache=false", "moe.experts=triton", "passes.disabled=[fuse_experts]")
    trainer_in(tmp_path / "unfused", *words)
    warned = [r.getMessage() for r in caplog.records if "has no effect" in r.getMessage()]
    assert sorted(warned) == [
        "moe.experts=triton has no effect with compile.enabled=false",
        "moe.experts=triton has no effect with the pass fuse_experts off",
        "passes.disabled=['fuse_loss'] has no effect with compile.enabled=false",
        "passes.dump=True has no effect with compile.enabled=false",
    ]


def test_the_experts_of_a_prediction_layer_are_experts(tmp_path, as_traced):
    words = ("model.num_dense_layers=2", "model.mtp_depth=1", "train.steps=1", "compile.cache=false")
    assert train_in(tmp_path / "run", *COMPILED, *words).execution.chosen.experts == "torch,torch,torch"


def test_without_a_compiler_the_run_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    said = "compile.enabled=true needs a C.. compiler .* compile.enabled=false"
    with pytest.raises(ConfigError, match=said):
        trainer_in(tmp_path / "run", *COMPILED)


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
def test_two_compiled_runs_on_two_threads_are_bitwise_equal(tmp_path):
    wide = (
        "model.hidden_size=64", "model.context_length=128", "model.num_layers=1", "model.num_dense_layers=0",
        "train.steps=4", "train.val_batches=0",
    )  # fmt: skip
    torch.set_num_threads(2)
    assert_same_runs(tmp_path, (*COMPILED, *wide))
