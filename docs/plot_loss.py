"""Plot the loss of a run: python docs/plot_loss.py run=outputs/tiny to=docs/images/tiny_loss.png"""

import json
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from graphmoe.config.arguments import parse_args, run_tool
from graphmoe.run.files import METRICS_FILE


@dataclass
class PlotArgs:
    run: Path
    """Folder of the run."""
    to: Path
    """PNG file to write."""


def main(argv: list[str]) -> None:
    """Run the command line."""
    args = parse_args(PlotArgs, argv, prog="docs/plot_loss.py")
    rows = [json.loads(line) for line in (args.run / METRICS_FILE).read_text().splitlines()]
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for key, label, style in (("loss", "training", "-"), ("val_loss", "validation", "o-")):
        points = [(row["step"], row[key]) for row in rows if key in row]
        axes.plot(*zip(*points, strict=True), style, label=label, markersize=4, linewidth=1.3)
    axes.set(xlabel="step", ylabel="cross-entropy, nats per token", title=f"run {args.run.name}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(args.to, dpi=130)


if __name__ == "__main__":
    run_tool(main)
