"""Expert loads: bar charts, and detection of dead or overfull experts."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

Loads = Sequence[Sequence[float]]  # loads relative to the mean of their MoE layer, by layer
Place = tuple[int, int]

DEAD = 0.02
OVERFULL = 0.8  # share of all tokens from which an expert is overfull
MOST_LOAD = 8.0  # load from which an expert is overfull even with a smaller share
LEAST_LOAD = 1.5  # load below which no expert is overfull
WINDOW = 10  # fewest steps whose mean load is judged
MOST_GLYPHS = 16
BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "._-=+*%#"
MOST_NAMED = 4


class Unbalanced(NamedTuple):
    """Experts that were dead or overfull in two consecutive windows of steps."""

    first: int
    last: int
    dead: list[Place]
    overfull: dict[Place, float]
    num_experts: int
    most: float

    def __str__(self) -> str:
        found = []
        if self.dead:
            found.append(
                f"{len(self.dead)} of {self.num_experts} experts get no tokens ({_named(self.dead)})"
            )
        if self.overfull:
            worst = max(self.overfull.values())
            of_all, named = "" if found else f" of {self.num_experts}", _named(list(self.overfull))
            found.append(
                f"{len(self.overfull)}{of_all} get up to {worst:.1f} times the mean, at most {self.most:.1f} "
                f"({named})"
            )
        return (
            f"steps {self.first} to {self.last}: {' and '.join(found)}; a larger model.aux_loss_coef or a "
            f"lower optim.lr spreads them"
        )


class LoadWatch:
    """Detector of unbalanced experts; compares each window of steps with the one before."""

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._sums: list[list[float]] = []
        self._steps = 0
        self._before: set[Place] = set()
        self.found: Unbalanced | None = None

    def add(self, last: int, steps: int, loads: Loads) -> Unbalanced | None:
        """Add mean loads of ``steps`` steps up to ``last``; at a full window, return unbalanced experts."""
        if not self._steps:
            self._sums = [[0.0] * len(layer) for layer in loads]
        self._sums = [
            [total + steps * load for total, load in zip(*layers, strict=True)]
            for layers in zip(self._sums, loads, strict=True)
        ]
        self._steps += steps
        if self._steps < WINDOW or not loads:
            return None
        self.found, self._steps = self._judge(last), 0
        return self.found

    def _judge(self, last: int) -> Unbalanced | None:
        means = {
            (layer, expert): total / self._steps
            for layer, totals in enumerate(self._sums)
            for expert, total in enumerate(totals)
        }
        most = len(self._sums[0]) / self._top_k
        full = max(min(OVERFULL * most, MOST_LOAD), LEAST_LOAD)
        now = {place for place, load in means.items() if load < DEAD or load >= full}
        stays, self._before = now & self._before, now
        if not stays:
            return None
        dead = sorted(place for place in stays if means[place] < DEAD)
        overfull = {place: means[place] for place in sorted(stays) if means[place] >= DEAD}
        return Unbalanced(last - self._steps + 1, last, dead, overfull, len(means), most)


def watch_rows(rows: Iterable[dict[str, Any]], top_k: int) -> list[Unbalanced]:
    watch = LoadWatch(top_k)
    return [each for row in rows if (each := watch.add(row["step"], row["steps"], row["load"]))]


def summary_of(rows: Sequence[dict[str, Any]], top_k: int) -> dict[str, int]:
    """Count the experts that are dead or overfull when a run ends, and the steps during which any were."""
    found = watch_rows(rows, top_k)
    at_end = found[-1] if found and rows[-1]["step"] - found[-1].last < WINDOW else None
    return {
        "dead_experts": len(at_end.dead) if at_end else 0,
        "overfull_experts": len(at_end.overfull) if at_end else 0,
        "unbalanced_steps": sum(each.last - each.first + 1 for each in found),
    }


def load_bar(loads: Sequence[float], glyphs: str = BLOCKS) -> str:
    """Return a bar chart: a glyph per expert, or per group's maximum; 0 if dead, glyph 4 at the mean load."""
    few = -(-len(loads) // MOST_GLYPHS)
    tops = [max(loads[start : start + few]) for start in range(0, len(loads), few)]
    return "".join("0" if top < DEAD else glyphs[min(int(top * 3.5), 7)] for top in tops)


def _named(places: Sequence[Place]) -> str:
    layers: dict[int, list[str]] = {}
    for layer, expert in places[:MOST_NAMED]:
        layers.setdefault(layer, []).append(str(expert))
    named = "; ".join(f"MoE layer {layer}: {', '.join(experts)}" for layer, experts in layers.items())
    return named + (", ..." if len(places) > MOST_NAMED else "")
