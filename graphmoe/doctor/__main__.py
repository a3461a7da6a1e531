"""Facts of this machine: versions, devices and links, capabilities, optional libraries.

python -m graphmoe.doctor
python -m graphmoe.doctor format=json
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
    from graphmoe.doctor.facts import examine, render  # imports torch

    document = examine()
    emit(document, render(document), args.format)


if __name__ == "__main__":
    run_tool(main)
