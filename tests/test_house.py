"""The house: rooms import only rooms to their left, no circles, sizes of files and rooms.

docs/map.md says what each room is for.
"""

import ast
import functools
import graphlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = """
    config
    segments
    plan
    ops
    model
    passes
    runtime.torch_compat
    runtime.host
    data
    runtime.ranks
    runtime.capture runtime.cache runtime.launch
    runtime.compile
    runtime.overlap runtime.dispatch
    runtime.pipeline
    checkpoint
    run
    optim
    training
    web_page
    trace pipeline_view
    report
    command
    project
    bench
    doctor
    worker
"""
"""Rooms from left to right. Rooms of one line know nothing of each other."""
COMMANDS = {
    *(
        "api",
        "bench",
        "cache",
        "convert",
        "doctor",
        "generate",
        "info",
        "pipeline_view",
        "prepare",
        "project",
    ),
    *("report", "trace", "train", "tune", "worker", "__main__"),
}
"""Commands of one file stand to the right of all rooms."""
MAX_FILE, MAX_ENTRIES = 400, 12
MAX_FILES, MAX_LINES, MAX_TEST_LINES, MAX_CHAIN = 350, 63_850, 50_640, 20
MAX_OF_ROOMS = {
    "ops": 10_685, "plan": 6_755, "training": 5_695, "runtime": 9_175, "bench": 2_540, "project": 1_895,
    "report trace pipeline_view web_page": 3_540, "checkpoint run": 6_030, "command": 1_740, "data": 3_170,
    "passes": 2_225, "model": 2_590, "config": 2_155, "optim": 2_065, "doctor": 1_235,
}  # fmt: skip
"""Lines. A limit is raised only in a commit of its own, which says what was removed to make room."""


@functools.cache
def sources() -> dict[str, Path]:
    found = {}
    for top in ("graphmoe", "passes", "runtime"):
        for file in sorted((ROOT / top).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            parts = parts if parts[0] == "graphmoe" else ("graphmoe", *parts)
            found[".".join(parts).removesuffix(".__init__")] = file
    return found


@functools.cache
def imports() -> dict[str, set[str]]:
    """Modules that each module imports, inside functions too, each by the file that it lies in."""
    return {module: {*_imports_of(file)} - {module} for module, file in sources().items()}


def _imports_of(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                names.append(inside if inside in sources() else node.module)
        yield from (name for name in names if name in sources())


def room_of(module: str) -> str:
    """Name of a module's room; the name of a command of one file is that of its room."""
    parts = module.split(".")[1:]
    if not parts or parts == ["__init__"]:
        return "graphmoe"
    if parts[0] == "runtime":
        return ".".join(parts[:2])
    return parts[0]


def floors() -> dict[str, int]:
    lines = [line.split() for line in ROOMS.strip().splitlines()]
    places = {room: number for number, line in enumerate(lines) for room in line}
    return places | {name: len(lines) for name in COMMANDS if name not in places} | {"graphmoe": len(lines)}


def longest_chain() -> list[str]:
    @functools.cache
    def below(module: str) -> tuple[str, ...]:
        return (module, *max((below(other) for other in imports()[module]), key=len, default=()))

    return [*max(map(below, imports()), key=len)]


def lines_of(files: Iterator[Path] | list[Path]) -> dict[str, int]:
    return {str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines()) for file in files}


def test_rooms_import_only_rooms_to_their_left():
    places = floors()
    assert {room_of(module) for module in sources()} - {"runtime", "graphmoe"} == {*places} - {"graphmoe"}
    upward = [
        f"{module} -> {other}"
        for module in sources()
        for other in imports()[module]
        if (here := room_of(module)) != (there := room_of(other))
        and places.get(here, 99) <= places.get(there, -1)
        and "graphmoe" not in (here, there)
    ]
    assert upward == []


def test_no_file_imports_itself_through_others():
    graphlib.TopologicalSorter(imports()).prepare()  # or a CycleError names the circle


def test_chains_of_imports_are_short():
    chain = longest_chain()
    assert len(chain) <= MAX_CHAIN, " -> ".join(chain)


def test_folders_and_files_are_few_and_short():
    source, tests = lines_of([*sources().values()]), lines_of([*(ROOT / "tests").rglob("*.py")])
    assert {file: lines for file, lines in (source | tests).items() if lines > MAX_FILE} == {}
    assert len(source) <= MAX_FILES
    assert sum(source.values()) <= MAX_LINES and sum(tests.values()) <= MAX_TEST_LINES
    of_room = Counter[str]()
    for file, lines in source.items():
        of_room[file.removeprefix("graphmoe/").partition("/")[0]] += lines
    found = {rooms: sum(of_room[room] for room in rooms.split()) for rooms in MAX_OF_ROOMS}
    assert {rooms: lines for rooms, lines in found.items() if lines > MAX_OF_ROOMS[rooms]} == {}
    assert 0 not in found.values()
    entries = {room.split(".")[0] for room in ROOMS.split()} - {"passes", "runtime"} - COMMANDS
    entered = {path.stem for path in (ROOT / "graphmoe").iterdir() if not path.is_symlink()}
    entered -= {"__init__", "__pycache__", "py"}  # py.typed
    assert entered == entries | COMMANDS and len(entries) <= MAX_ENTRIES


def strings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the strings that code reads: those that are no docstring."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node


def test_a_module_may_move_since_no_string_names_it():
    """Hang reports, restarts, sweeps and keys of caches look for objects, not for names of files."""
    modules = {*sources()} - {"graphmoe", *(f"graphmoe.{name}" for name in COMMANDS)}
    files = {file.name for file in sources().values()} - {"__init__.py", "__main__.py"}
    named = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.value}"
        for file in sources().values()
        for node in strings(ast.parse(file.read_text(encoding="utf-8")))
        if modules & {*re.findall(r"graphmoe[.\w]*\w", node.value)}
        or files & {*re.findall(r"\w+\.py\b", node.value.replace("\\", ""))}
    ]
    assert named == []
