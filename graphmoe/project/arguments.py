"""Keys that only ``graphmoe.project`` has, their checks, and completion of the run's configuration."""

import contextlib
import difflib
import enum
import math
import shlex
import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from graphmoe.command.words import help_text, run_words
from graphmoe.config.arguments import answer_version, emit, file_problems, nearest, usage, wants_help
from graphmoe.config.choices import OutputFormat
from graphmoe.config.schema import ComputeDtype, ConfigError, LaunchConfig, RunConfig, TrainConfig
from graphmoe.plan.costs.hardware import Card, card_of
from graphmoe.plan.layout import Layout
from graphmoe.plan.rules.auto import ROUNDS, assumed_size

Assumptions = enum.StrEnum("Assumptions", ("exact", "published"))
Sweep = enum.StrEnum("Sweep", ("gpus",))


@dataclass
class ProjectArgs:
    hardware: str
    """Card of all ranks: mi300x, mi325x, mi355x, mi450, h100, h200, b200, gb200 or gb300."""
    nodes: int | None = None
    """Nodes of gpus_per_node GPUs, > 0; null takes launch.nodes, or 1."""
    gpus_per_node: int | None = None
    """GPUs of a node, > 0; null takes launch.nproc, or the card's: 4 of gb200, gb300 and mi450, else 8."""
    assumptions: Assumptions = Assumptions.exact
    """exact: the bytes that this project's runs hold; published: those of a published chart."""

    rates: Path | None = None
    """JSON file with shares of the card's peaks that were measured, in place of the tool's own."""
    search: bool = False
    """Look for the layouts that fit the model on so many GPUs, by projected throughput."""
    top: int = 10
    """Layouts that search=true lists, > 0."""
    try_fp8: bool = False
    """search=true tries each layout with precision.fp8=rowwise too."""
    sweep: Sweep | None = None
    """gpus: the layout with more data parallelism, on doubling numbers of nodes up to 4,096 GPUs."""
    page: Path | None = None
    """Page with pictures to write, a file that ends in .html."""

    def place(self, launch: LaunchConfig, fixed: frozenset[str], replica: int = 1) -> None:
        """Set nodes and GPUs per node from a run's keys; without launch.nproc a node has all its GPUs.

        Without a number of nodes it is 1, or with a sweep the fewest for multiples of ``replica`` GPUs.
        """
        is_open = launch.nproc == LaunchConfig.nproc and "launch.nproc" not in fixed
        if self.gpus_per_node is None and not is_open and launch.nproc != "auto":
            self.gpus_per_node = int(launch.nproc)
        fewest = replica // math.gcd(replica, self.per_node) if self.sweep else 1
        self.nodes = self.nodes or (fewest if launch.nodes == "auto" else int(launch.nodes))

    @property
    def card(self) -> Card:
        card = card_of(self.hardware)
        return replace(card, per_node=self.gpus_per_node or card.per_node)

    @property
    def per_node(self) -> int:
        return self.card.per_node

    @property
    def num_ranks(self) -> int:
        return (self.nodes or 1) * self.per_node


OWN_KEYS = {"launch.nproc": "gpus_per_node", "launch.nodes": "nodes"}  # of a run, and of the tool
GLOBAL_BATCH = "train.global_batch_size"
MICRO_BATCH = "train.micro_batch_size"
FP8 = "precision.fp8"
NAMES_DATA = {"data", "data.source", "data.paths", "data.hf_name", "experiment"}
DATA = "data=synthetic"
ENDPOINT = "launch.endpoint=node0:29500"
MISSPELT = 0.7
"""Similarity from which a word is a misspelt key of the tool; a run's keys and groups are less similar."""


def split_words(argv: Sequence[str], cls: type, prog: str, examples: Sequence[str]) -> list[list[str]]:
    """Return a tool's words and those of a run; --help and --version exit. *Raises* ConfigError."""
    hints, with_all = typing.get_type_hints(cls), "--help=all" in argv
    if with_all or wants_help(argv):
        text = help_text(prog, examples, argv, with_all=with_all, more=hints)
        emit({}, f"{usage(cls, prog)}\nand those of a run.\n\n{text}", OutputFormat.text)
        sys.exit(0)
    answer_version(argv)
    check_words(argv, [*hints])
    words = run_words(argv, hints)
    own = [word for word in words if word.partition("=")[0] in hints]
    return [own, [word for word in words if word not in own]]


def check_words(words: Sequence[str], keys: Sequence[str]) -> None:
    """Raise ConfigError for misspelt keys of a tool, and for ``-m``."""
    given = [word for word in words if "=" in word or word.startswith("--")]
    names = {word.removeprefix("--").partition("=")[0] for word in given} - {*keys}
    misspelt = [name for name in sorted(names) if difflib.get_close_matches(name, keys, n=1, cutoff=MISSPELT)]
    problems = [f"unknown key '{name}'{nearest(name, keys)}" for name in misspelt]
    multirun = [word for word in words if word in ("-m", "--multirun")]
    problems += [f"{word}: this tool takes one run; leave it out" for word in multirun]
    if problems:
        raise ConfigError("; ".join(problems))


def check(args: ProjectArgs, words: Sequence[str]) -> None:
    """Raise ConfigError for values out of range, and for contradictory keys of a run."""
    numbers = {"nodes": args.nodes, "gpus_per_node": args.gpus_per_node, "top": args.top}
    problems = [f"{key}={n} must be 1 or more" for key, n in numbers.items() if n is not None and n < 1]
    for word in words:
        name, _, value = word.lstrip("+").partition("=")
        if name == "launch.fake_world":
            problems.append(f"{word}: the number of ranks is launch.nodes times launch.nproc; set these")
        for key, own in (("launch.nodes", args.nodes), ("launch.nproc", args.gpus_per_node)):
            if name == key and own is not None:
                also = f"{OWN_KEYS[key]}={own}"
                problems.append(f"{word} and {also} are both given; leave one of the two out")
        if args.search and name == "pipeline.microbatches" and value != "null":
            problems.append(f"{word} sets another global batch for each layout; use train.global_batch_size")
    if args.search and args.assumptions is Assumptions.published:
        problems.append("search=true does not support assumptions=published; leave it out")
    for key, is_given in (("search", args.search), ("page", args.page is not None)):
        if args.sweep and is_given:
            problems.append(f"sweep={args.sweep} does not support {key}=; leave one of the two out")
    if args.try_fp8 and not args.search:
        problems.append("try_fp8=true applies to search=true only; add that, or use precision.fp8=rowwise")
    if args.try_fp8 and FP8 in fixed_keys(words):
        problems.append(f"try_fp8=true tries {FP8}=none and rowwise; leave one of the two out")
    problems += file_problems("page", args.page, "page.html")
    if problems:
        raise ConfigError("; ".join(problems))
    _ = args.card


def completed(config: RunConfig, args: ProjectArgs, fixed: frozenset[str] = frozenset()) -> RunConfig:
    """Return the configuration on the tool's ranks, in bf16, with a global batch if none was chosen.

    A rank has ``pipeline.microbatches`` micro-batches, or 4 per rank of a pipeline, or one. A search has
    4 * ``train.micro_batch_size`` sequences per GPU, and its layout is not checked yet.
    """
    args.place(config.launch, fixed, replica_size(config))
    config = replace(
        config,
        launch=replace(config.launch, nproc=args.per_node, nodes=args.nodes),
        precision=replace(config.precision),
        train=replace(config.train),
    )
    if config.precision.compute is ComputeDtype.auto:
        config.precision.compute = ComputeDtype.bf16
    is_open = GLOBAL_BATCH not in fixed and config.train.global_batch_size == TrainConfig.global_batch_size
    if args.search:
        return _to_search(config, args, is_open)
    if is_open:  # neither a word nor a file has chosen a global batch
        with contextlib.suppress(ConfigError, ZeroDivisionError):  # the rules of a run refuse these
            layout = Layout.of(config.parallel, args.num_ranks)
            count = config.pipeline.microbatches or (ROUNDS * layout.pp if layout.pp > 1 else 1)
            config.train.global_batch_size = assumed_size(config) * layout.dp * count
    return config


def replica_size(config: RunConfig) -> int:
    """Return the fewest GPUs that a layout can have; others are multiples. 1 for sizes below 1."""
    sizes = config.parallel
    return max(sizes.pp * math.lcm(sizes.cp * sizes.tp, sizes.ep * sizes.etp), 1)


def fixed_keys(words: Sequence[str]) -> frozenset[str]:
    return frozenset(word.lstrip("+~").partition("=")[0] for word in words)


def train_command(words: Sequence[str], found: str, args: ProjectArgs) -> str:
    """Return the command that starts a run on each node, with the overrides of the user and of a search."""
    keys = fixed_keys(words)
    own = [word for word in words if not fixed_keys([word]) & {"format", *OWN_KEYS}]
    data = [] if keys & NAMES_DATA else [DATA]
    nodes = args.num_ranks // args.per_node
    launch = [f"launch.nproc={args.per_node}", f"launch.nodes={nodes}"]
    launch += [ENDPOINT] * (nodes > 1 and "launch.endpoint" not in keys)
    return shlex.join(["python", "-m", "graphmoe.train", *own, *data, *found.split(), *launch])


def to_change(command: str, card_gb: float) -> str:
    """Return text that says what the user has to change in a `train_command` before running it."""
    words, notes = shlex.split(command), []
    if DATA in words:
        notes.append(f"replace {DATA}, which generates random tokens, by your data")
    if ENDPOINT in words:
        notes.append(f"run it on each node, with the first node's name for {ENDPOINT.partition('=')[2]}")
        notes.append("in a Slurm step leave launch.nodes and launch.endpoint out")
    given = dict(word.partition("=")[::2] for word in words)
    ranks = int(given["launch.nproc"]) * int(given["launch.nodes"])
    dry = f"launch.fake_world={ranks} launch.fake_memory_gb={card_gb:g}"
    notes.append(f"with {dry} added, it is only checked, memory included, on any machine")
    text = "; ".join(notes)
    return f"{text[0].upper()}{text[1:]}."


def _to_search(config: RunConfig, args: ProjectArgs, is_open: bool) -> RunConfig:
    config.launch.nproc = config.launch.nodes = "auto"
    if is_open:
        config.train.global_batch_size = 4 * args.num_ranks * assumed_size(config)
    # other dispatchers need ranks that share experts
    if config.moe.dispatcher not in ("auto", "local", "alltoall") and config.parallel.ep == 1:
        ep = math.gcd(config.model.num_experts, args.per_node)
        config.parallel = replace(config.parallel, ep=ep)
    return config
