"""Facts of this machine: versions, devices and links, capabilities, optional libraries.

python -m graphmoe.doctor
python -m graphmoe.doctor format=json
python -m graphmoe.doctor prove=gpu.json

Only functions import torch, so that a misspelt key is answered at once.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from graphmoe.config.arguments import emit, file_problems, parse_args, run_tool
from graphmoe.config.ranges import ConfigError
from graphmoe.config.schema import OutputFormat


@dataclass
class DoctorArgs:
    prove: Path | None = None
    """File that ends in .json, for the results of 20 checks of kernels, graphs and exchanges, which take at
    most 15 minutes."""
    format: OutputFormat = OutputFormat.text
    """Form of the findings on stdout: text, or one JSON document."""


def main(argv: list[str]) -> None:
    args = parse_args(DoctorArgs, argv, prog="graphmoe.doctor")
    if args.prove is None:
        from graphmoe.doctor import machine

        findings = machine.examine()
        emit(findings, machine.render(findings), args.format)
        return
    if problems := [*file_problems("prove", args.prove, "gpu.json")]:
        raise ConfigError("; ".join(problems))
    from graphmoe.doctor import prove

    document = prove.prove(args.prove, prove.TABLE)
    emit(document, prove.render(document), args.format)
    if any(check["status"] == prove.FAILED for check in document["checks"]):
        sys.exit(1)


if __name__ == "__main__":
    run_tool(main)
