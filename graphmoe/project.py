"""Will a run fit its GPUs, and how fast will it be: from its configuration alone, without a GPU.

python -m graphmoe.project model=moe_1t parallel.pp=24 parallel.ep=8 hardware=mi355x nodes=96
python -m graphmoe.project model=qwen3_30b_a3b parallel.ep=8 hardware=h200 format=json
"""

from __future__ import annotations

import functools
import sys

from graphmoe.cli import emit, parse_args, run_tool, usage
from graphmoe.config import RunConfig
from graphmoe.entry import hydra_app
from graphmoe.projection.arguments import ProjectArgs, check, completed, split_words

PROG = "graphmoe.project"
EXAMPLES = [
    "python -m graphmoe.project model=moe_1t parallel.pp=24 parallel.ep=8 hardware=mi355x nodes=96",
    "python -m graphmoe.project model=qwen3_30b_a3b parallel.ep=8 hardware=h200 format=json",
]
HELP = {"-h", "--help", "help"}


def main() -> None:
    """Run the command line."""
    run_tool(run)


def run(argv: list[str]) -> None:
    """Project what is asked: the tool's own words here, all others by Hydra."""
    own, others = split_words(argv)
    if HELP & set(argv):
        print(usage(ProjectArgs, PROG), end="\n\nand the keys of a run:\n\n")
        args = ProjectArgs("mi300x")
    else:
        args = parse_args(ProjectArgs, own, prog=PROG)
        check(args, others)
    sys.argv[1:] = others
    show = functools.partial(_show, args)
    hydra_app(show, prog=PROG, examples=EXAMPLES, complete=functools.partial(completed, args=args))


def _show(args: ProjectArgs, config: RunConfig) -> None:
    """Print the projection of the configured run."""
    from graphmoe.projection.document import project  # imports torch
    from graphmoe.projection.tables import render

    document = project(config, args)
    emit(document, render(document), config.format)


if __name__ == "__main__":
    main()
