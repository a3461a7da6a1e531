"""Run a command by its name: graphmoe train, or python -m graphmoe train. Without a name it lists them."""

import importlib
import inspect
import sys

from graphmoe.config.arguments import (
    COMMANDS,
    answer_version,
    emit,
    nearest,
    print_error,
    run_tool,
    wants_help,
)
from graphmoe.config.choices import OutputFormat


def main() -> None:
    name, words = sys.argv[1] if len(sys.argv) > 1 else "help", sys.argv[2:]
    answer_version([name])
    if wants_help([name]):
        emit({}, overview(), OutputFormat.text)
        return
    if name not in COMMANDS:
        print_error(f"there is no command '{name}'{nearest(name, list(COMMANDS))}")
        sys.exit(2)
    if name in ("train", "worker"):  # before imports that take a third of a second
        from graphmoe.runtime.host.signals import exit_at_signals

        exit_at_signals()
    sys.argv[1:] = words
    module = importlib.import_module(f"graphmoe.{name}")
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"graphmoe.{name}.__main__")
    if inspect.signature(module.main).parameters:
        run_tool(module.main)
    else:  # it reads the words itself
        module.main()


def overview() -> str:
    lines = [f"  {name:<15}{line}" for name, line in COMMANDS.items()]
    return "\n".join(
        [
            "usage: graphmoe <command> key=value ...",
            "Trains Mixture-of-Experts language models. Commands:",
            *lines,
            "`graphmoe <command> --help` lists the keys; `python -m graphmoe.<command>` is the same.",
        ]
    )


if __name__ == "__main__":
    main()
