"""Project whether a run fits its GPUs, and how fast it is: from its configuration alone, without a GPU.

python -m graphmoe.project model=moe_1t parallel.pp=24 parallel.ep=8 train.micro_batch_size=1 \\
    hardware=mi355x nodes=96
python -m graphmoe.project model=qwen3_30b_a3b parallel.ep=8 recompute=all hardware=h200 format=json
python -m graphmoe.project model=moe_1t train.micro_batch_size=1 hardware=mi355x nodes=96 search=true
python -m graphmoe.project experiment=deepseek_v3_512_mi325x hardware=mi325x sweep=gpus
"""

import functools
import shlex
import sys

from graphmoe.command.hydra import hydra_app
from graphmoe.config.arguments import emit, parse_args, run_tool
from graphmoe.config.progress import working
from graphmoe.config.schema import ConfigError, RunConfig
from graphmoe.project.arguments import ProjectArgs, check, completed, fixed_keys, split_words

PROG = "graphmoe.project"
RUN = "python -m graphmoe.project model=moe_1t train.micro_batch_size=1 hardware=mi355x nodes=96"
EXAMPLES = [
    f"{RUN} parallel.pp=24 parallel.ep=8",
    "python -m graphmoe.project model=qwen3_30b_a3b parallel.ep=8 recompute=all hardware=h200 format=json",
    f"{RUN} search=true",
    "python -m graphmoe.project experiment=deepseek_v3_512_mi325x hardware=mi325x sweep=gpus",
]


def main(argv: list[str]) -> None:
    own, others = split_words(argv, ProjectArgs, PROG, EXAMPLES)
    command = shlex.join(["python", "-m", PROG, *argv])

    @functools.cache
    def asked() -> ProjectArgs:  # checked only after Hydra has refused misspelt keys of a run
        args = parse_args(ProjectArgs, own, prog=PROG)
        check(args, others)
        return args

    sys.argv[1:] = others
    hydra_app(
        lambda config: _show(asked(), command, others, config),
        prog=PROG,
        examples=EXAMPLES,
        complete=lambda config: completed(config, asked(), fixed_keys(others)),
    )


def _show(args: ProjectArgs, command: str, words: list[str], config: RunConfig) -> None:
    from graphmoe.project.document import project, scaled  # imports torch
    from graphmoe.project.search import search
    from graphmoe.project.tables import render, render_scaled, render_search, write_projection, write_search

    if args.search:
        with working("projecting") as report:
            document = search(config, args, words, report, lambda line: print(line, file=sys.stderr))
    else:
        document = (scaled if args.sweep else project)(config, args)
    shown = render_search if args.search else render_scaled if args.sweep else render
    write = write_search if args.search else write_projection
    emit(document, shown(document), config.format)
    if args.page is not None:
        try:
            write(args.page, command, document)
        except OSError as error:
            raise ConfigError(f"cannot write page={args.page}: {error.strerror}") from error
        print(f"wrote {args.page}", file=sys.stderr)


if __name__ == "__main__":
    run_tool(main)
