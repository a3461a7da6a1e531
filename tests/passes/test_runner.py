"""PassRunner: order, counts, reasons, hash, dump; and the choice of passes by configuration."""

import functools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import fx

from graphmoe.config.schema import ConfigError, PassesConfig
from graphmoe.passes import PASSES, select_passes
from graphmoe.passes.base import PassRunner, PassSpec, Rewrites
from graphmoe.runtime.compile.units import fakes_of, trace_forward
from tests.runs import ROOT


def swap_sin(graph: fx.Graph, *, times: int = 1) -> Rewrites:
    found = [node for node in graph.nodes if node.target is torch.sin]
    for node in found[:times]:
        node.target = torch.cos
    return Rewrites(min(len(found), times), tuple(f"{node.name} is one too many" for node in found[times:]))


def drop_neg(graph: fx.Graph) -> int:
    found = [node for node in graph.nodes if node.target is torch.neg]
    for node in found:
        node.replace_all_uses_with(node.args[0])
    return len(found)


SIN = PassSpec("swap_sin", swap_sin, "forward", "bitwise", ("mlp",), {"times": 1})
NEG = PassSpec("drop_neg", drop_neg, "forward", "bitwise")
HALF = functools.partial(swap_sin, times=2)
OF_HALF, NOWHERE = replace(SIN, run=HALF), replace(SIN, run=eval("lambda graph: 0"))
NOT_PLAIN, LATE = replace(SIN, knobs={"times": torch.ones(1)}), replace(SIN, stage="backward")


def reports_of(*specs, run=torch.sin, segments=("attn", "mlp"), **named):
    return PassRunner(specs).run("forward", fx.symbolic_trace(lambda x: run(x)), "unit", segments, **named)


def test_passes_run_in_order_and_say_what_they_did():
    graph = fx.symbolic_trace(lambda x: torch.neg(torch.sin(torch.sin(x))))
    sizes = iter([100, 100, 40])
    runner = PassRunner([SIN, replace(SIN, stage="joint"), NEG])
    first, second = runner.run("forward", graph, "mlp", ("mlp",), lambda _: next(sizes))
    assert [(r.name, r.matches, r.nodes_before, r.nodes_after) for r in (first, second)] == [
        ("swap_sin", 1, 3, 3),
        ("drop_neg", 1, 3, 2),
    ]
    assert [(r.saved_bytes_before, r.saved_bytes_after) for r in (first, second)] == [(100, 100), (100, 40)]
    assert first.left == ("sin_1 is one too many",)
    x = torch.randn(3)
    assert graph(x).equal(x.cos().sin())


def test_an_expected_pass_that_changes_nothing_says_why(caplog, passes_may_miss):
    for times, run, segments, said in (
        (0, torch.sin, ("attn", "mlp"), "pass swap_sin changed nothing in unit: sin is one too many"),
        (1, torch.cos, ("mlp",), "nothing that looks like its pattern"),
        (1, torch.cos, ("attn",), ""),
    ):
        caplog.clear()
        reports_of(replace(SIN, knobs={"times": times}), run=run, segments=segments)
        assert said in caplog.text and bool(caplog.text) == bool(said)


def test_an_expected_pass_that_knows_another_form_reports_it_without_a_warning(caplog):
    spec = replace(SIN, run=lambda graph, times=1: Rewrites(0, (), "cos is as good", expected=False))
    (report,) = reports_of(spec, run=torch.cos)
    assert report.left == ("cos is as good",) and not caplog.text


def test_a_pass_that_returns_no_number_is_an_error():
    with pytest.raises(TypeError, match="nothing returned None"):
        reports_of(PassSpec("nothing", lambda graph: None, "forward", "bitwise"))


def test_the_hash_follows_order_parameters_and_selection():
    twice = replace(SIN, knobs={"times": 2})
    hashes = [PassRunner(specs).uuid() for specs in ([SIN, NEG], [NEG, SIN], [SIN], [twice, NEG])]
    assert len(set(hashes)) == 4
    assert PassRunner([SIN, NEG]).uuid() == hashes[0]
    with pytest.raises(TypeError, match="swap_sin: parameters must be plain"):
        PassRunner([replace(SIN, knobs={"times": torch.zeros(1)})]).uuid()


def test_the_hash_follows_the_source(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "a_users_pass.py"
    hashes = []
    for body in ("return 0", "return 1"):
        source.write_text(f"def own(graph):\n    {body}\n")
        sys.modules.pop("a_users_pass", None)
        specs = select_passes(PassesConfig(enabled=[], extra=["a_users_pass:own"]), {})
        hashes.append(PassRunner(specs).uuid())
    assert hashes[0] != hashes[1]


def test_the_hash_is_the_same_in_another_process():
    line = "from graphmoe.passes import PASSES, base; print(base.PassRunner(PASSES).uuid())"
    run = subprocess.run([sys.executable, "-c", line], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == PassRunner(PASSES).uuid()


def test_a_dump_shows_the_graph_before_and_after_each_change(tmp_path):
    graph = fx.symbolic_trace(lambda x: torch.neg(torch.sin(x)))
    PassRunner([SIN, replace(NEG, name="other"), NEG], tmp_path / "graphs").run("forward", graph, "a..b")
    files = {path.name: path.read_text() for path in sorted((tmp_path / "graphs").iterdir())}
    changes = ("001.a..b.swap_sin", "002.a..b.other")
    assert [*files] == [f"{change}.{when}.py" for change in changes for when in ("after", "before")]
    after, before, *_ = files.values()
    assert "torch.sin(" in before and "torch.cos(" in after and "torch.sin(" not in after


def test_every_pass_runs_with_its_parameters_unless_it_is_named_otherwise():
    def chosen(knobs=None, **config):
        return [spec.name for spec in select_passes(PassesConfig(**config), knobs or {})]

    names = [spec.name for spec in PASSES if not spec.optional]
    assert chosen() == names and chosen(enabled=[]) == []
    assert chosen({spec.name: {} for spec in PASSES if spec.optional}) == [spec.name for spec in PASSES]
    assert chosen(enabled=[names[2], names[0]]) == [names[0], names[2]]
    assert chosen(disabled=["fuse_loss"]) == [name for name in names if name != "fuse_loss"]
    specs = {s.name: s for s in select_passes(PassesConfig(), {"fuse_experts": {"backend": "triton"}})}
    assert specs["fuse_experts"].knobs["backend"] == "triton"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"enabled": ["fuse_rooter"]}, "enabled=.*no pass fuse_rooter; there are .*fuse_router"),
        (
            {"disabled": ["fuse_activation"]},
            r"fuses the results of fuse_activation.*passes.disabled=\[fuse_activation,fuse_experts\]",
        ),
        ({"enabled": ["fuse_experts"]}, "fuses the results of fuse_permutation and fuse_activation"),
        ({"disabled": ["x", "fuse_loss"]}, "passes.disabled=.*no pass x;"),
        ("nowhere.at_all:f", "passes.extra=nowhere.at_all:f cannot be imported"),
        ("math:no_such", "passes.extra=math:no_such cannot be imported"),
        ("math:pi", "passes.extra=math:pi: 3.14.* is not a plain function"),
        ("math", "extra=math: there is no .* use package.module:NAME"),
        (f"{__name__}:HALF", "HALF: functools.partial.* is not a plain function"),
        (f"{__name__}:OF_HALF", r"OF_HALF: functools.partial.* write def f\(graph\)"),
        (f"{__name__}:NOWHERE", "NOWHERE: <function .* in a source file"),
        (f"{__name__}:NOT_PLAIN", "swap_sin: parameters must be plain values"),
        (f"{__name__}:LATE", "LATE has the stage 'backward'; use 'forward' or 'joint'"),
    ],
)
def test_what_cannot_be_a_pass_is_a_configuration_error(given, message):
    with pytest.raises(ConfigError, match=message):
        select_passes(PassesConfig(**({"extra": [given]} if isinstance(given, str) else given)), {})


def test_the_example_of_the_documentation_is_a_pass(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "compile.md").read_text()
    (tmp_path / "my_passes.py").write_text(page.split("```python\n# my_passes.py\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    (spec,) = select_passes(PassesConfig(enabled=[], extra=["my_passes:square_as_product"]), {})
    norm = torch.nn.RMSNorm(4, elementwise_affine=False)
    graph = trace_forward(lambda x: (norm(x),), fakes_of([torch.randn(2, 4)]))
    (report,) = PassRunner([spec]).run("forward", graph, "mlp")
    assert (report.name, report.matches) == ("square_as_product", 1)
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.pow.Tensor_Scalar)
