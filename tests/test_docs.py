"""The documentation is true: tables, links, quoted command lines, paths and words."""

import ast
import contextlib
import functools
import importlib
import itertools
import json
import pickle
import re
import shlex
from unittest import mock

import pytest
import torch
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import get_args
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from graphmoe.command.errors import explain, known_keys
from graphmoe.command.hydra import read_words, to_config
from graphmoe.config.arguments import parse_args
from graphmoe.config.choices import CODE_FOLDERS, SEGMENT_NAMES
from graphmoe.config.schema import ConfigError, ModelConfig, MoEConfig
from graphmoe.model.layer import PLAN, DenseLayer, MoELayer
from graphmoe.project.arguments import ProjectArgs, completed, split_words
from graphmoe.worker import TRUSTED
from tests.runs import ROOT, hydra_config

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/*.md")])
COMMAND = re.compile(
    r"(\$\()?(?:\bpython3? (?:-m (graphmoe\.\w+)|(\w+/\w+\.py))|^graphmoe ((?!<)\w+)(?=$| ))(.*)"
)
TERMS = """
    bubble, capacity, capture, cold compile, combine, dead rows, dispatch, expert, global batch,
    graph scope, live rows, local expert, main weights, micro-batch, pass, permute, pipeline, replay,
    router, routing plan, row, segment, shared expert, slot, stage, step, unpermute, warm compile
"""
NOT_FOR_READERS = (
    r"\bissues? #?\d", r"(?<!pytorch )(?<![\w(/&])#\d", r"\bsessions?\b", r"\bhelpers?\b",
    r"/(work|home|root|mnt)/", r"[^\x00-\x7f]",
)  # fmt: skip


def name_of(path):
    return str(path.relative_to(ROOT))


def fenced(text):
    """The code blocks of a page, lines that end with a backslash joined with the next."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [block.replace("\\\n", " ") for block in blocks]


def prose(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def inline(text):
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(text))]


def commands_in(path):
    """Lines of a page's code, or of a YAML file's comments, that call one of the project's tools.

    With each comes the error that the page shows below it, if any.
    """
    text = path.read_text(encoding="utf-8")
    pieces = inline(text) + fenced(text)
    if path.suffix == ".yaml":
        pieces = re.findall(r"^#   (.*)", text, flags=re.MULTILINE)
    for lines in (piece.splitlines() for piece in pieces):
        for line, below in itertools.zip_longest(lines, lines[1:], fillvalue=""):
            if COMMAND.search(line):
                yield line.strip(), below.removeprefix("error: ") if below.startswith("error: ") else None


SOURCES = [*PAGES, *ROOT.glob("conf/**/*.yaml")]
QUOTED = {(name_of(path), *quoted) for path in SOURCES for quoted in commands_in(path)}
COMMANDS = sorted((page, line) for page, line, error in QUOTED if error is None)
MISTAKES = sorted((line, error) for _, line, error in QUOTED if error is not None)


def words_of(line):
    """The tool that a command line calls, and its words up to a pipe or the like."""
    in_substitution, module, script, command, rest = COMMAND.search(line).groups()
    module = f"graphmoe.{command}" if command else module
    rest = rest.split(")")[0] if in_substitution else rest
    lexer = shlex.shlex(re.sub(r"<[^<>\s]+>", "given", rest), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return module or script, list(itertools.takewhile(lambda word: not set(word) <= set("();<>|&"), lexer))


def load(tool):
    module = importlib.import_module(tool.removesuffix(".py").replace("/", "."))
    return importlib.import_module(f"{tool}.__main__") if hasattr(module, "__path__") else module


def words_for(override):
    """A word for each job of a sweep; for a range without steps, which Optuna searches, its first value."""
    key = override.get_key_element()
    if override.is_interval_sweep():
        return [f"{key}={override.value().start}"]
    if override.is_sweep_override():
        return [f"{key}={value}" for value in override.sweep_string_iterator()]
    return [str(override.input_line)]


composed = functools.cache(lambda *groups, **how: pickle.dumps(hydra_config(*groups, **how)))
"""The configuration of some options of groups; composing takes most of the time of a command line."""


def check_hydra_words(words, folder, complete=None):
    args = get_args(list(words))
    if args.shell_completion:
        assert args.overrides == ["install=bash"]
        return
    overrides = list(args.overrides)
    if args.config_dir:  # a folder of the reader's own: stand-ins for the options that are not ours
        for group, _, option in (word.partition("=") for word in overrides):
            if (ROOT / "conf" / group).is_dir() and not (ROOT / "conf" / group / f"{option}.yaml").exists():
                (folder / group).mkdir(exist_ok=True)
                (folder / group / f"{option}.yaml").write_text(f"name: {option}\n")
        overrides.append(f"hydra.searchpath=[file://{folder}]")
    parsed = OverridesParser.create().parse_overrides(overrides)
    swept = any(override.is_sweep_override() for override in parsed)
    assert swept <= args.multirun, "a comma outside brackets is a sweep, which needs -m"
    for chosen in itertools.product(*map(words_for, parsed)):
        groups = tuple(word for word in chosen if is_of_a_group(word))
        with_hydra = any(word.lstrip("+~").startswith("hydra") for word in chosen)  # half of the time
        cfg = pickle.loads(composed(*groups, with_hydra=with_hydra))
        values = OverridesParser.create().parse_overrides([word for word in chosen if word not in groups])
        if with_hydra:
            OmegaConf.set_readonly(cfg.hydra, False)
        ConfigLoaderImpl._apply_overrides_to_config(values, cfg)
        with open_dict(cfg):
            cfg.pop("hydra", None)
        to_config(cfg, complete=complete)


class Parsed(Exception):
    """End of a tool that was to read its words only."""


def parse_only(*given, **named):
    parse_args(*given, **named)
    raise Parsed


def is_of_a_group(word):
    key = word.partition("=")[0].lstrip("+~")
    return "/" in key or key == "hydra.searchpath" or (ROOT / "conf" / key).is_dir()


def with_stand_in(word, folder):
    """The word with a stand-in for a model's folder that only its reader has."""
    key, _, name = word.partition("=")
    if key != "model" or not name or "," in name or (ROOT / "conf" / "model" / f"{name}.yaml").exists():
        return word
    (folder / name).mkdir(parents=True)
    published = json.loads((ROOT / "tests" / "data" / "published_configs.json").read_text())
    (folder / name / "config.json").write_text(json.dumps(published["deepseek_v2_lite"]))
    return f"{key}={folder / name}"


def check_command(page, line, folder):
    tool, words = words_of(line)
    module = load(tool)
    if "--config-dir" not in words:
        given, words = words, [with_stand_in(word, folder) for word in words]
        of_text = bool({"data=files", "data=chat"} & {*words})
        words += ["data.tokenizer=tokenizer.json"] * (words != given and of_text)
    if words and words[-1] in ("--help", "--help=all", "--version") and not (words := words[:-1]):
        return
    if tool == "graphmoe.project" and words:
        own, words = split_words(words, ProjectArgs, tool, [])
        args = parse_args(ProjectArgs, own, prog=tool)
        check_hydra_words(read_words(words), folder, functools.partial(completed, args=args))
    elif hasattr(module, "hydra_app"):
        check_hydra_words(read_words(words), folder, getattr(module, "with_some_batch", None))
    elif tool == "graphmoe.worker":
        assert words and all(map(TRUSTED.fullmatch, words[1:]))
    elif not words and line in inline((ROOT / page).read_text(encoding="utf-8")):
        return  # an inline command without words is a tool's name in a sentence
    elif hasattr(module, "parse_args"):
        with mock.patch.object(module, "parse_args", parse_only), contextlib.suppress(Parsed):
            module.main(words)
    else:
        assert words == []


def test_quoted_command_lines_are_valid(tmp_path, monkeypatch):
    (code_of_readers := tmp_path / "code").mkdir()
    for text in (path.read_text(encoding="utf-8") for path in PAGES):
        for name, code in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            (code_of_readers / name).write_text(code)
    for path in ROOT.glob("examples/**/*.py"):
        (code_of_readers / path.name).write_text(path.read_text(encoding="utf-8"))
    monkeypatch.setenv(CODE_FOLDERS, str(code_of_readers))
    assert {"docs/configuration.md", "docs/data.md", "CONTRIBUTING.md"} <= {page for page, _ in COMMANDS}
    failed = []
    for number, (line, page) in enumerate({line: page for page, line in COMMANDS}.items()):
        (folder := tmp_path / str(number)).mkdir()
        try:
            check_command(page, line, folder)
        except Exception as error:
            failed.append(f"{page}: {line}: {error}")
    assert failed == []


def test_a_quoted_error_is_what_its_command_line_gives(tmp_path):
    assert MISTAKES
    for line, message in MISTAKES:
        _, words = words_of(line)
        with pytest.raises((ConfigError, HydraException, OmegaConfBaseException)) as caught:
            check_hydra_words(words, tmp_path)
        error = caught.value
        assert (str(error) if isinstance(error, ConfigError) else explain(error, words)) == message, line


def test_segments_of_the_page_about_one_step_are_as_it_prints_them(capsys):
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    code, printed = re.search(r"# show_segments.py\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL).groups()
    exec(code, {})
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_paths_and_make_targets_of_a_page_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    lines = [line for block in fenced(text) + inline(text) for line in block.splitlines()]
    assert {made[1] for line in lines if (made := re.match(r"make ([a-z-]+)", line))} <= targets
    for target in re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", prose(text)):
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists() and (not anchor or anchor in anchors(path)), target
    for code in inline(text):
        is_path = re.fullmatch(r"(benchmarks|conf|docs|graphmoe|passes|runtime|tests)/[\w./*-]*", code)
        assert not is_path or any(ROOT.glob(code)), code


def anchors(page):
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_site_has_each_page_once():
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"\S+\.md$", text[text.index("\nnav:") :], flags=re.MULTILINE)
    written = [str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")]
    names = sorted([*written, *load("docs/site_pages.py").PAGES.values()])
    assert sorted(listed) == names, "list each page under nav in mkdocs.yml"


@pytest.mark.parametrize(
    ("page", "link", "expected", "without_address"),
    [("README.md", "[a](docs/compile.md#keys)", "[a](compile.md#keys)", None),
     ("README.md", "![a](docs/images/report.png)", "![a](images/report.png)", None),
     ("docs/map.md", "[a](../README.md)", "[a](index.md)", None),
     ("docs/benchmarks/README.md", "[a](../data.md)", "[a](../data.md)", None),
     ("docs/map.md", "[`a`](../passes/base.py)", "[`a`](https://x/blob/main/passes/base.py)", "`a`"),
     ("docs/map.md", "[a](#rooms) [b](https://y)", "[a](#rooms) [b](https://y)", None)],
)  # fmt: skip
def test_links_of_a_page_lead_to_pages_of_the_site_and_to_sources(page, link, expected, without_address):
    site_links = load("docs/site_pages.py").site_links
    assert site_links(link, page, "https://x/") == expected
    assert site_links(link, page, "") == (without_address or expected)


def test_the_python_interface_that_a_page_names_is_there():
    assert (names := re.findall("^::: (.+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE))
    for module, _, name in (name.rpartition(".") for name in names):
        assert getattr(importlib.import_module(module), name).__doc__, name


def test_a_page_speaks_to_its_reader_only():
    unfit = re.compile(f"^.*(?:{'|'.join(NOT_FOR_READERS)}).*$", re.IGNORECASE | re.MULTILINE)
    found = {name_of(page): unfit.findall(page.read_text(encoding="utf-8")) for page in PAGES}
    assert {page: lines for page, lines in found.items() if lines} == {}


def test_the_configuration_page_is_up_to_date():
    tables = load("docs/make_tables.py")
    assert tables.PAGE.read_text(encoding="utf-8") == tables.render(), "run: make docs"


def test_an_experiment_opens_with_a_sentence_and_its_command():
    assert (experiments := sorted(ROOT.glob("conf/experiment/**/*.yaml")))
    for file in experiments:
        package, sentence, command = file.read_text().splitlines()[:3]
        assert package == "# @package _global_" and sentence.startswith("# "), file
        option = file.relative_to(ROOT / "conf" / "experiment").with_suffix("")
        assert command == f"#   python -m graphmoe.train experiment={option}", file


def rows_below(page, header):
    lines = page.read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(header))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_segment_table_is_what_the_layers_declare():
    config = ModelConfig()
    with torch.device("meta"):
        layers = DenseLayer(config).segments() + MoELayer(config, MoEConfig()).segments()
    expected = {}
    for each in layers:
        writes = ("the routing plan",) if each.writes == PLAN else each.writes
        expected[f"`{each.name}`"] = [", ".join(each.reads), ", ".join(writes), each.stream]
    table = rows_below(ROOT / "docs" / "architecture.md", "| segment |")
    assert {row[0]: row[1:4] for row in table} == expected


def test_the_page_for_users_of_other_trainers_names_keys_that_there_are():
    lines = (ROOT / "docs" / "from_other_trainers.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[1:-1] for line in lines if re.match(r"\| [^M-]", line) and "|" in line]
    flags = {flag for row in rows for cell in row[:2] for flag in re.findall(r"`([^`]+)`", cell)}
    keys = [key for row in rows for key in re.findall(r"`([\w.]+)[^`]*`", row[2])]
    assert len(flags) >= 60 and [key for key in keys if key not in known_keys()] == []
    assert all(len(row) == 4 and (row[2].strip() == "-" or "`" in row[2]) for row in rows)


def test_the_glossary_defines_each_term_once_in_alphabetical_order():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = [term for row in text.splitlines() if (term := re.match(r"\| ([^|]+) \| [^|]+ \|$", row))]
    names = [match[1].strip("`") for match in terms if match[1] not in ("term", "---")]
    assert len(set(names)) == len(names)
    assert {*SEGMENT_NAMES, *(term.strip() for term in TERMS.split(","))} <= set(names)
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        rows = [row.split("|")[1].strip(" `").lower() for row in table.splitlines()[2:]]
        assert rows == sorted(rows)


def test_each_line_of_the_changelog_names_a_symbol_or_a_command():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    entries = re.split(r"^- ", text, flags=re.MULTILINE)[1:]
    assert entries and [entry for entry in entries if "`" not in entry] == []


def test_messages_of_the_troubleshooting_page_are_in_the_sources():
    files = [file for top in ("graphmoe", "passes", "runtime") for file in (ROOT / top).rglob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    said = (node for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr))
    pieces = [getattr(node, "values", [node]) for node in said]
    texts = ["".join(str(getattr(part, "value", "")) for part in parts) for parts in pieces]
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    patterns = {said: ".*".join(map(re.escape, said.split("..."))) for said in messages}
    found = {said for said, pattern in patterns.items() if re.search(pattern, "\0".join(texts))}
    assert len(messages) > 10 and found == {*messages}
