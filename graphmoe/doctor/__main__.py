"""Facts of this machine: versions, devices and links, capabilities, optional libraries.

python -m graphmoe.doctor
python -m graphmoe.doctor format=json

Only functions import torch, so that a misspelt key is answered at once.
"""

from dataclasses import dataclass

from graphmoe.config.arguments import emit, parse_args, run_tool
from graphmoe.config.schema import OutputFormat


@dataclass
class DoctorArgs:
    format: OutputFormat = OutputFormat.text
    """Form of the findings on stdout: text, or one JSON document."""


def main(argv: list[str]) -> None:
    args = parse_args(DoctorArgs, argv, prog="graphmoe.doctor")
    from graphmoe.doctor import machine

    findings = machine.examine()
    emit(findings, machine.render(findings), args.format)


if __name__ == "__main__":
    run_tool(main)
