"""Fixtures of all tests: torch's switches, a cache of the session's own, and a small corpus of text."""

import gc
import logging
import os

import pytest

# Set before any test module imports torch; children inherit it. Inductor writes scalar code: else it tries
# each instruction set in every process (2 to 18 s), and takes 10% longer.
os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}

LONG = {"distributed", "launch", "runtime", "sweep", "training"}
"""Folders of tests that start processes or compile much."""

WORKERS_PER_GPU = 10
"""Each takes up to 7 GB of its GPU, and a core of the host."""


def is_on_gpu(config):
    return config.getoption("markexpr").startswith("gpu")


def visible_gpus():
    import torch

    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return shown.split(",") if shown else [str(index) for index in range(torch.cuda.device_count())]


@pytest.hookimpl(optionalhook=True)  # -p no:xdist
def pytest_xdist_auto_num_workers(config):
    cores = len(os.sched_getaffinity(0))
    return min(cores, WORKERS_PER_GPU * max(len(visible_gpus()), 1)) if is_on_gpu(config) else cores


def pytest_configure(config):
    """Give each worker of ``-m gpu`` another first GPU; tests of several GPUs still see all of them."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and is_on_gpu(config) and (gpus := visible_gpus()):
        first = int(worker.removeprefix("gw")) % len(gpus)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


def pytest_collection_modifyitems(config, items):
    """Leave out slow and exhaustive tests unless -m names them; run long files first.

    Else one worker ends alone with them. On a GPU all tests of ``-m gpu`` run but the exhaustive ones.
    """
    expression = config.getoption("markexpr")
    unnamed = [mark for mark in ("slow", "exhaustive") if mark not in expression]
    if "gpu" in expression and "slow" in unnamed:
        unnamed.remove("slow")
    left_out = [item for item in items if any(map(item.get_closest_marker, unnamed))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: not LONG & {*item.path.parts})


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory):
    """Empty folders for tokenised corpora and compiled code, instead of the user's own."""
    folder = tmp_path_factory.mktemp("cache")
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # what one worker compiled serves the others
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHMOE_CACHE", str(folder))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(base / "inductor"))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def imports_are_no_garbage():
    """Collections pass over what was imported and stays: a sixth of the time of tests that train."""
    gc.freeze()
    yield
    gc.unfreeze()  # triton 3.9 reports its objects that Python's last collection may not free as leaks


def _set_switches():
    """Torch's settings of the whole process as a new process has them, on one thread.

    They are part of the keys of its caches too, so what one test sets decides what another finds there.
    """
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.compiler.config.cache_key_tag = ""  # a run that compiles sets it, and the variable
    os.environ.pop("TORCH_COMPILE_CACHE_KEY_TAG", None)


@pytest.fixture(scope="module", autouse=True)
def switches_of_module():
    _set_switches()


@pytest.fixture(autouse=True)
def switches():
    """Set torch's switches before every test, whatever the last test or a fixture that trains has set."""
    _set_switches()
    yield
    _set_switches()


@pytest.fixture(autouse=True)
def logs_end():
    """Remove handlers that a command in this process set, as its console ends with the test."""
    yield
    root = logging.getLogger()
    for handler in [each for each in root.handlers if "pytest" not in type(each).__module__]:
        root.removeHandler(handler)


@pytest.fixture(autouse=True)
def memory_is_free_for_others(pytestconfig):
    """Return what a test of ``-m gpu`` held to the GPU, which other workers share."""
    yield
    if is_on_gpu(pytestconfig):
        import torch

        gc.collect()
        torch.cuda.empty_cache()


def _refuse_warnings(record):
    assert record.levelno < logging.WARNING, record.getMessage()
    return True


@pytest.fixture(scope="session", autouse=True)
def passes_match():
    """A pass that should match in a unit and does not is an error, but for tests with `passes_may_miss`."""
    logging.getLogger("graphmoe.passes.base").addFilter(_refuse_warnings)
    yield
    logging.getLogger("graphmoe.passes.base").removeFilter(_refuse_warnings)


@pytest.fixture
def passes_may_miss(passes_match):
    """Let a pass that should match change nothing, with the warning that users get."""
    logging.getLogger("graphmoe.passes.base").removeFilter(_refuse_warnings)
    yield
    logging.getLogger("graphmoe.passes.base").addFilter(_refuse_warnings)


@pytest.fixture
def unmeasured():
    """Let passes not tell how many bytes each saves, for tests that do not depend on these numbers."""
    from tests.distributed.training import unmeasured

    with unmeasured():
        yield


@pytest.fixture
def as_traced():
    """Run units as they were traced, for tests of the parts around code that other tests compile.

    Their runs have ``compile.cache=false``, or a later one would look there for what was never compiled.
    """
    from tests.distributed.training import as_traced

    with as_traced():
        yield


@pytest.fixture
def swinging_load(monkeypatch):
    """About half of the micro-batches repeat one token, so that with top_k=1 one expert gets all rows.

    Which do follows from the tokens alone, so it is the same in every run. The router is the model's own,
    and chooses on the device.
    """
    from graphmoe.data import Loader

    natural = Loader.__next__

    def swing(self):
        tokens = natural(self)
        if tokens[0, 0] % 2:
            tokens.fill_(tokens[0, 0].item())
        return tokens

    monkeypatch.setattr(Loader, "__next__", swing)


@pytest.fixture(scope="session")
def text_words(tmp_path_factory):
    from graphmoe.data.tokenizer import train_bpe
    from tests.data.texts import sentences, write_jsonl

    folder = tmp_path_factory.mktemp("corpus")
    text, tokenizer = folder / "text.jsonl", folder / "tokenizer.json"
    train_bpe(iter(sentences(200)), 320, 200).save(str(tokenizer))
    write_jsonl(text, sentences(300))
    files = ["data.source=files", f"data.paths=[{text}]", f"data.tokenizer={tokenizer}"]
    return [*files, "model.vocab_size=320"]


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    return lambda name, text: (tmp_path / f"{name}.py").write_text(text)


@pytest.fixture
def one_peer():
    """Let operations with peers run: this process is the only one."""
    from graphmoe.ops.symm import CollectivePeers, use_peers

    use_peers(CollectivePeers(None))
    yield
    use_peers(None)
