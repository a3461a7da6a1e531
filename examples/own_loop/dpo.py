"""Direct preference optimization (arXiv 2305.18290) by graphmoe.Trainer, on made-up preferences.

python examples/own_loop/dpo.py [OVERRIDE ...], or torchrun --nproc-per-node 2 examples/own_loop/dpo.py ...
"""

import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

import graphmoe

BETA, STEPS, PAIRS, PROMPT, ANSWER, LIKED = 0.1, 20, 8, 16, 8, 7


def batch_of(step: int, rank: int) -> dict[str, Tensor]:
    """Return token ids [2 * PAIRS, PROMPT + ANSWER]: chosen answers repeat one token, rejected are random."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    prompt = torch.randint(0, 4096, (PAIRS, PROMPT), generator=generator)
    rejected = torch.randint(0, 4096, (PAIRS, ANSWER), generator=generator)
    chosen = torch.full_like(rejected, LIKED)
    return {"tokens": torch.cat([torch.cat([prompt, answer], 1) for answer in (chosen, rejected)])}


def answer_log_probs(trainer: graphmoe.Trainer, tokens: Tensor) -> Tensor:
    return trainer.log_probs(tokens)[:, PROMPT - 1 :].sum(dim=1)


def margin(trainer: graphmoe.Trainer, batch: dict[str, Tensor]) -> Tensor:
    chosen, rejected = (answer_log_probs(trainer, batch["tokens"]) - batch["reference"]).chunk(2)
    return BETA * (chosen - rejected)


def loss(trainer: graphmoe.Trainer, batch: dict[str, Tensor]) -> Tensor:
    return -F.logsigmoid(margin(trainer, batch)).mean()


def main() -> None:
    words = "model=tiny", "optim.lr=3e-4", "optim.warmup_steps=0", f"train.steps={STEPS}", *sys.argv[1:]
    rank = int(os.environ.get("RANK", "0"))
    with graphmoe.Trainer(*words) as trainer:
        batches = [batch_of(step, rank) for step in range(STEPS)]
        with torch.no_grad():  # the weights before training are the reference
            for batch in batches:
                batch["reference"] = answer_log_probs(trainer, batch["tokens"])
        for step, batch in enumerate(batches, 1):
            row = trainer.step(batch, loss)
            if rank == 0 and step in (1, STEPS):
                print(f"step {step}: loss {row['loss']:.4f}, gradient norm {row['grad_norm']:.3f}")
        trainer.save_hf("exported/dpo")


if __name__ == "__main__":
    main()
