"""Graphs that jobs of the same facts share: the same numbers without a trace, and for nothing else."""

import enum
from pathlib import Path

import pytest
import torch

from graphmoe.model.layer import MoELayer
from graphmoe.ops.permute import permute
from graphmoe.passes.base import PassReport
from graphmoe.plan.recompute import UnitRecompute
from graphmoe.runtime.compile import graphs as unit_graphs
from graphmoe.runtime.compile import kept
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.runtime.compile.kept import kept_graphs, lasting_text
from graphmoe.runtime.compile.units import Unique
from tests.runs import assert_same_state
from tests.runtime.test_compiled import executor as executor_of
from tests.runtime.test_compiled import gradients, model_of


@pytest.fixture(autouse=True)
def unedited(monkeypatch):
    """Let sources count as older than this process, whatever a clock that was set makes of its start."""
    monkeypatch.setattr(kept, "own_sources", list)


def executor(folder: Path, *overrides: str) -> CompiledSegments:
    made = executor_of(*overrides)
    made.kept = folder
    return made


def embed() -> unit_graphs.UnitGraphs:
    return unit_graphs.UnitGraphs(torch.fx.GraphModule({}, torch.fx.Graph()), 0, (), name="embed")


def refuse(*given, **named):
    raise AssertionError("traced")


def test_a_second_run_traces_nothing_and_has_the_same_numbers_and_reports(tmp_path, monkeypatch, as_traced):
    found = []
    for _ in range(2):
        made = executor(tmp_path)
        output, of_parameters = gradients(model_of(), made)
        rows = [(r.unit, r.graphs, r.kept_bytes, r.passes) for r in made.reports]
        found.append((output.total, of_parameters, rows))
        monkeypatch.setattr(unit_graphs, "trace_forward", refuse)
        monkeypatch.setattr(unit_graphs, "joint_graph", refuse)
    assert any(passes for *_, passes in found[0][-1])
    assert_same_state(*(dict(zip(("total", "gradients", "reports"), each, strict=True)) for each in found))
    with pytest.raises(AssertionError, match="traced"):
        gradients(model_of(), executor(tmp_path, "passes.disabled=[fuse_loss]"))


@pytest.mark.parametrize("problem", ["cannot be pickled", "a source was edited"])
def test_what_is_not_stored_is_traced_by_each_run(tmp_path, monkeypatch, caplog, problem):
    caplog.set_level("INFO")
    made, folder, source = embed(), tmp_path / "graphs", tmp_path / "edited.py"
    if problem == "a source was edited":
        source.touch()
        monkeypatch.setattr(kept, "own_sources", lambda: [source])
    else:
        made.reports.append(value for value in ())
    for _ in range(2):
        assert kept_graphs(folder, ("embed",), lambda: made) is made
    assert not folder.exists() and "graphs of embed are not saved" in caplog.text


def test_a_warning_of_a_pass_is_there_in_each_run(tmp_path, caplog, passes_may_miss):
    made, warning = embed(), "pass fuse changed nothing"
    made.reports.append(PassReport("fuse", "embed", 0, 3, 3, None, None, 0.1, (), warning))
    kept_graphs(tmp_path, ("embed",), lambda: made)
    assert not caplog.text  # a trace has said it itself
    kept_graphs(tmp_path, ("embed",), refuse)
    assert warning in caplog.text


def test_graphs_that_cannot_be_read_are_traced_and_stored_again(tmp_path, caplog):
    made = embed()
    kept_graphs(tmp_path, ("embed",), lambda: made)
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"torn")
    assert kept_graphs(tmp_path, ("embed",), lambda: made) is made and "cannot be read" in caplog.text
    assert kept_graphs(tmp_path, ("embed",), refuse).name == "embed"


class Kind(enum.Enum):
    ONE = 1


@pytest.mark.parametrize(
    "value", [lambda: 0, Kind.ONE, model_of, Unique(3), object(), [1], (1, (Unique(3),))]
)
def test_what_other_processes_do_not_have_has_no_lasting_text(value):
    assert lasting_text(value) is None


def test_lasting_texts_are_of_one_value_each():
    values = [1, 1.0, True, "1", None, (1,), ((1,),), torch.float32, "torch.float32", torch.device("cpu")]
    values += [MoELayer, permute, (3, 4), torch.Size((3, 4, 5)), frozenset({"b", "a"})]
    values += [UnitRecompute((frozenset({"attn"}),)), UnitRecompute((), frozenset({"attn"}))]
    texts = [lasting_text(value) for value in values]
    assert None not in texts and len({*texts}) == len(values)
    assert lasting_text(frozenset({"a", "b"})) == lasting_text(frozenset({"b", "a"}))
