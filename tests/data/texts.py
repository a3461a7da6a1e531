"""Small texts to read."""

import json
import random
from pathlib import Path

SENTENCE = "the loss of an expert is shown for each token and router while gradients wait in line"


def sentences(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [f"{i}: " + " ".join(rng.choices(SENTENCE.split(), k=rng.randint(3, 40))) for i in range(count)]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path
