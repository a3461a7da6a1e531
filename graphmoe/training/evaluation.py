"""Evaluation of a model: validation loss, and generated text (also for ``graphmoe.generate``)."""

import itertools
import logging
import math
from collections.abc import Iterator

import torch
from tokenizers import Tokenizer
from torch import Tensor

from graphmoe.config.ranges import number_of
from graphmoe.config.schema import ConfigError, MoEConfig, TrainConfig
from graphmoe.config.token_flags import ID_BITS
from graphmoe.data import Corpus, first_batches
from graphmoe.model.build import build_model
from graphmoe.model.transformer import LossOutput, Transformer
from graphmoe.ops import IN_USE
from graphmoe.plan.pipeline.layouts import StagePieces
from graphmoe.plan.plan import Plan
from graphmoe.runtime.dispatch.ladder import ReceiveLadder
from graphmoe.runtime.launch.stamps import Heartbeat, wait_for
from graphmoe.runtime.ranks import Mesh, sums
from graphmoe.training.micro_batches import MicroBatches, rooms_of

log = logging.getLogger(__name__)


class Validation:
    """Mean cross-entropy of the first validation batches, the same ones each time.

    If labels may be ignored, it is the mean over the trained tokens of all batches; NaN if there are none.
    """

    def __init__(
        self,
        plan: Plan,
        corpus: Corpus,
        micro_batches: MicroBatches,
        mesh: Mesh,
        heartbeat: Heartbeat,
        ladder: ReceiveLadder | None,
    ) -> None:
        self.config, self.corpus, self.micro_batches = plan.train, corpus, micro_batches
        self._ignores_labels = plan.ignores_labels
        self.mesh, self.heartbeat, self.ladder = mesh, heartbeat, ladder
        if self.wanted:
            self._warn_of_few()

    @property
    def wanted(self) -> bool:
        return self.config.val_batches > 0 and self.corpus.val is not None

    def _warn_of_few(self) -> None:
        config, found = self.config, self.corpus.val.num_samples if self.corpus.val else None
        if found is None or (batches := found // config.micro_batch_size) >= config.val_batches:
            return
        more = "more text of data.val_paths or a larger data.val_fraction makes validation less noisy"
        level = logging.INFO if config.val_batches == TrainConfig().val_batches else logging.WARNING
        if batches:
            there, few = number_of(batches, "micro-batch"), f"train.val_batches={config.val_batches}"
            end = f"train.val_batches={batches} says that it is meant"
        else:
            there, few = number_of(found, "sample"), f"train.micro_batch_size={config.micro_batch_size}"
            few, end = f"{few}: some count twice", "train.val_batches=0 switches it off"
        log.log(level, "validation has %s, less than %s; %s, and %s", there, few, more, end)

    @torch.no_grad()
    def __call__(self) -> tuple[float, int]:
        """Return the mean loss and the number of micro-batches. A collective; weights must be gathered."""
        assert self.corpus.val is not None
        self.heartbeat.validation()
        batches = [*first_batches(self.corpus.val, self.config.val_batches, self.config.micro_batch_size)]
        mean, has_room = self._mean(batches)
        if not has_room:
            assert self.ladder is not None
            self.heartbeat.slow("the validation, again with room for everything")
            with self.ladder.without_limit():
                mean, _ = self._mean(batches)
        if IN_USE.exchange:
            IN_USE.exchange.drop_prefetched()  # weights of replicas that a backward would have read
        return mean, len(batches)

    def _mean(self, batches: list[Tensor]) -> tuple[float, bool]:
        layout, index = self.mesh.layout, self.mesh.index("dp")
        model, device = self.micro_batches.model, self.micro_batches.device
        totals_2 = torch.zeros(2, device=device)  # of weighted losses, and of weights
        short = torch.zeros((), dtype=torch.int32, device=device)
        has_limit = model.dispatcher is not None and model.dispatcher.capacity is not None
        rooms_L2 = rooms_of(model.dispatchers, device) if has_limit else None
        numbers = range(index, index + len(batches), layout.dp)
        # ranks without batches left repeat the last one, since experts wait for tokens of all ranks
        mine = [batches[min(number, len(batches) - 1)] for number in numbers]
        weights_M = torch.tensor([float(number < len(batches)) for number in numbers], device=device)
        if self._ignores_labels:
            weights_M = weights_M * model.count_trained([tokens.to(device) for tokens in mine])[:, 0]
        weights = iter(weights_M)

        def add(pieces: StagePieces, output: LossOutput) -> None:
            if pieces.loss:
                weight = next(weights)
                totals_2.add_(torch.stack([output.cross_entropy * weight, weight]))
            if rooms_L2 is not None and output.received_L2 is not None:
                layers = model.moe_layers(pieces)
                short.add_((output.received_L2 > rooms_L2[layers.start : layers.stop]).any())

        self.micro_batches.evaluate(mine, add)
        (totals_2,) = sums(self.mesh.group("dp_pp"), totals_2)
        total, weight = wait_for(totals_2.tolist)
        mean = total / weight if weight else math.nan
        return mean, not has_limit or not sums(self.mesh.group("world"), short)[0].item()


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
    if model.end_token is not None:
        alone.mask_documents(model.end_token)
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

    A stream gives tokens of its first sample. *Raises* DataError if the stream is exhausted.
    """
    samples = corpus.val or corpus.train
    documents = getattr(samples, "documents", None)
    first = (
        [samples.reader().read(0, 1)[0][:PROMPT_TOKENS]]
        if documents is None
        else (documents.tokens(number, 0, PROMPT_TOKENS) for number in range(documents.num_documents))
    )
    texts = (
        tokenizer.decode([token & ID_BITS for token in ids.tolist()]).rstrip("\ufffd")
        for ids in itertools.islice(first, 100)
    )
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
