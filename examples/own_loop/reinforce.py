"""Policy gradient (REINFORCE with a mean baseline) by graphmoe.Trainer; transformers samples the answers.

The sampler gets new weights in memory before each step, as vLLM and other engines would.
python examples/own_loop/reinforce.py [OVERRIDE ...]
"""

import sys
import tempfile

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig
from transformers.utils import logging

import graphmoe

STEPS, ANSWERS, PROMPT, ANSWER = 12, 32, 4, 12


def sampler_of(trainer: graphmoe.Trainer, config: PretrainedConfig) -> torch.nn.Module:
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return model_class.from_pretrained(None, config=config, state_dict=dict(trainer.weights()))


def answers_of(sampler: torch.nn.Module) -> Tensor:
    """Return equal prompts and their sampled answers, [ANSWERS, PROMPT + ANSWER]."""
    prompt = torch.full((ANSWERS, PROMPT), 1, device=sampler.device)
    how = {"do_sample": True, "max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "top_k": 0}
    return sampler.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **how)


def reward_of(tokens: Tensor) -> Tensor:
    """Return 1.0 for each answer token whose id is below 1024, else 0.0."""
    return (tokens[:, PROMPT:] < 1024).float()


def loss(trainer: graphmoe.Trainer, batch: dict[str, Tensor]) -> Tensor:
    log_probs = trainer.log_probs(batch["tokens"])[:, PROMPT - 1 :]
    return -(batch["advantage"] * log_probs).mean()


def main() -> None:
    torch.manual_seed(0)
    logging.disable_progress_bar()
    words = "model=tiny_gqa", "optim.lr=3e-3", "optim.warmup_steps=0", f"train.steps={STEPS}", *sys.argv[1:]
    with graphmoe.Trainer(*words) as trainer, tempfile.TemporaryDirectory() as folder:
        trainer.save_hf(folder)
        config = AutoConfig.from_pretrained(folder)
        for step in range(1, STEPS + 1):
            tokens = answers_of(sampler_of(trainer, config))
            reward = reward_of(tokens)
            trainer.step({"tokens": tokens, "advantage": (reward - reward.mean()).to(trainer.device)}, loss)
            if step in (1, STEPS):
                print(f"step {step}: mean reward {reward.mean():.3f}")


if __name__ == "__main__":
    main()
