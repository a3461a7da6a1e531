from concurrent.futures import wait

import numpy as np
import pytest
import torch

from graphmoe.config.schema import ConfigError
from graphmoe.data.loader import Loader
from graphmoe.data.samples import Samples
from graphmoe.data.sources import SyntheticSamples


@pytest.fixture
def samples():
    return SyntheticSamples(seq_len=4, vocab_size=1000, seed=1)


def rows_over_ranks(samples, prefetch):
    """The global row of samples as 1, 2, 4 ranks and 1 go on from each other's state, and the last state."""
    state, rows = None, []
    for world_size in (1, 2, 4, 1):
        options = {"micro_batch_size": 2, "global_batch_size": 8, "prefetch": prefetch}
        ranks = [Loader(samples, rank=r, world_size=world_size, **options) for r in range(world_size)]
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        rows += [next(loader) for _ in range(12 // world_size) for loader in ranks]
        states = [loader.state_dict() for loader in ranks]
        assert all(s == states[0] for s in states)
        state = states[-1]
        [loader.close() for loader in ranks]
    return torch.cat(rows), state


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_resume_with_1_2_4_1_ranks_gives_the_same_global_stream(samples, prefetch):
    rows, _ = rows_over_ranks(samples, prefetch)
    assert torch.equal(rows, torch.from_numpy(samples.reader().read(0, len(rows))))


def test_the_state_counts_what_was_handed_out_not_what_was_prefetched(samples):
    loader = Loader(samples, micro_batch_size=2, global_batch_size=8, prefetch=6)
    next(loader)
    assert wait(loader._ahead, 10).done and len(loader._ahead) == 6
    assert loader.state_dict()["consumed"] == 2
    loader.close()


def test_another_corpus_is_refused_on_resume(samples):
    state = Loader(samples, micro_batch_size=2, global_batch_size=8).state_dict()
    other = Loader(SyntheticSamples(4, 1000, seed=2), micro_batch_size=2, global_batch_size=8)
    with pytest.raises(ConfigError, match="not that of the checkpoint"):
        other.load_state_dict(state)


class Failing(Samples):
    """Samples of which the fifth cannot be read."""

    seq_len, num_samples, fingerprint = 1, 100, "failing"

    def sample(self, position):
        if position == 4:
            raise OSError("the disk is gone")
        return np.array([position, position + 1])


@pytest.mark.parametrize("prefetch", [0, 1, 8])
def test_an_error_of_the_thread_is_raised_after_the_batches_before_it(prefetch):
    loader = Loader(Failing(), micro_batch_size=2, global_batch_size=2, prefetch=prefetch)
    assert [next(loader)[0, 0].item() for _ in range(2)] == [0, 2]
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            next(loader)
    assert loader.place.consumed == 4
    loader.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a GPU")
def test_batches_lie_in_pinned_memory_when_asked(samples):
    loader = Loader(samples, micro_batch_size=2, global_batch_size=8, pin_memory=True)
    assert next(loader).is_pinned()
    loader.close()
