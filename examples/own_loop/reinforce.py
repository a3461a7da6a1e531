"""Policy gradient with a mean baseline by graphmoe.Trainer; transformers samples answers of small token ids.

The sampler gets new weights in memory before each round, as vLLM and other engines would. A round is two
updates by importance weights, which replay the experts of the weights that sampled.
python examples/own_loop/reinforce.py [OVERRIDE ...]
"""

import sys
import tempfile

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig
from transformers.utils import logging

import graphmoe

ROUNDS, ANSWERS, PROMPT, ANSWER = 8, 32, 4, 12


def sampler_of(trainer: graphmoe.Trainer, config: PretrainedConfig) -> torch.nn.Module:
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return model_class.from_pretrained(None, config=config, state_dict=dict(trainer.weights()))


def answers_of(sampler: torch.nn.Module) -> Tensor:
    """Return equal prompts and their sampled answers, [ANSWERS, PROMPT + ANSWER]."""
    prompt = torch.full((ANSWERS, PROMPT), 1, device=sampler.device)
    how = {"do_sample": True, "max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "top_k": 0}
    return sampler.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **how)


def loss(trainer: graphmoe.Trainer, batch: dict[str, Tensor]) -> Tensor:
    log_probs = trainer.log_probs(batch["tokens"], batch["routes"])
    ratio = (log_probs - batch["sampled"]).exp()[:, PROMPT - 1 :]
    return -(batch["advantage"] * ratio).mean()


def main() -> None:
    torch.manual_seed(0)
    logging.disable_progress_bar()
    words = "model=tiny_gqa", "optim.lr=3e-3", "optim.warmup_steps=0", "train.steps=16", *sys.argv[1:]
    with graphmoe.Trainer(*words) as trainer, tempfile.TemporaryDirectory() as folder:
        trainer.save_hf(folder)
        config = AutoConfig.from_pretrained(folder)
        for number in range(1, ROUNDS + 1):
            tokens = answers_of(sampler_of(trainer, config))
            reward = (tokens[:, PROMPT:] < 1024).float()
            batch = {"tokens": tokens, "advantage": (reward - reward.mean()).to(trainer.device)}
            with torch.no_grad():
                batch |= {"routes": trainer.routes(tokens), "sampled": trainer.log_probs(tokens)}
            trainer.step(batch, loss)
            trainer.step(batch, loss)
            if number in (1, ROUNDS):
                print(f"round {number}: mean reward {reward.mean():.3f}")


if __name__ == "__main__":
    main()
