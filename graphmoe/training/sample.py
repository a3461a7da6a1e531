"""Text generation at a run's end and for ``graphmoe.generate``."""

import itertools
from collections.abc import Iterator

import torch
from tokenizers import Tokenizer
from torch import Tensor

from graphmoe.config.schema import ConfigError, MoEConfig
from graphmoe.data import Corpus
from graphmoe.model.build import build_model
from graphmoe.model.transformer import Transformer

PROMPT_TOKENS = 16


def model_of_one_rank(model: Transformer, execution: MoEConfig) -> Transformer | None:
    """Return a model that shares the weights and runs on this rank alone; None if they are sharded.

    It has no dispatcher, whose buffers are sized for a micro-batch.
    """
    layout = model.layout
    if layout.tp * layout.pp * layout.size("ep_etp") > 1:
        return None
    if layout.cp == 1 and model.dispatcher is None:
        return model
    alone = build_model(model.config, device="meta", execution=execution)
    alone.load_state_dict(model.state_dict(), assign=True)
    for router, other in zip(alone.routers(), model.routers(), strict=True):
        router.earlier_counts, router.load_ends = other.earlier_counts, other.load_ends  # not in the state
    return alone


def generate(
    model: Transformer, tokenizer: Tokenizer, prompt: str, num_tokens: int, temperature: float, seed: int
) -> Iterator[str]:
    """Yield the prompt, then each token's text; incomplete UTF-8 is held back."""
    text = shown = ""
    for ids in _continued(model, tokenizer, prompt, num_tokens, temperature, seed):
        text = tokenizer.decode(ids)
        if text.startswith(shown) and not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
    yield text[len(shown) :]


def prompt_of(corpus: Corpus, tokenizer: Tokenizer) -> str:
    """Return the first tokens of a validation or training document; '' without text.

    For a stream they are of its first sample. *Raises* DataError if it is exhausted.
    """
    samples = corpus.val or corpus.train
    documents = getattr(samples, "documents", None)
    first = (
        [samples.reader().read(0, 1)[0][:PROMPT_TOKENS]]
        if documents is None
        else (documents.tokens(number, 0, PROMPT_TOKENS) for number in range(documents.num_documents))
    )
    texts = (tokenizer.decode(ids.tolist()).rstrip("\ufffd") for ids in itertools.islice(first, 100))
    return next((text for text in texts if text.strip()), "")


@torch.no_grad()
def _continued(
    model: Transformer, tokenizer: Tokenizer, prompt: str, num_tokens: int, temperature: float, seed: int
) -> Iterator[list[int]]:
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    if not ids:
        raise ConfigError(f"prompt='{prompt}' has no tokens; give some text")
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    yield ids
    for _ in range(num_tokens):
        window = torch.tensor([ids[-model.config.context_length :]], device=device)
        ids.append(int(_pick(model(window)[0, -1, : tokenizer.get_vocab_size()], temperature, generator)))
        yield ids


def _pick(logits_V: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature <= 0:
        return logits_V.argmax()
    return torch.multinomial((logits_V / temperature).softmax(dim=-1), 1, generator=generator)
