"""Rules of a run: data, schedule, checkpoints, compilation, capture, recompute, profile and dry run."""

import dataclasses
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from graphmoe.config.arguments import nearest
from graphmoe.config.choices import FP8_PRODUCTS, SOURCES
from graphmoe.config.formats import FORMATS
from graphmoe.config.ranges import spelled
from graphmoe.config.schema import ConfigError, DataConfig, DpShard, Fp8Recipe, RunConfig, TrainConfig
from graphmoe.plan.experts import experts_of, has_experts, runs_pass
from graphmoe.plan.layout import Layout
from graphmoe.plan.rules.auto import ROUNDS, assumed_size
from graphmoe.plan.rules.parallel import seq_len_of
from graphmoe.segments import CAPTURABLE, FULL_ITERATION, SCOPES, segments_of

OF_MOE = {*SCOPES["moe"], "shared_experts"}
MOST_TOKENS = 10**18
LONGEST_NAME = 200  # bytes: file systems allow 255, and numbers and endings are added


def name_rules(config: RunConfig) -> Iterator[str]:
    name = config.run.name
    if name in ("", ".", "..") or set("/\\\0") & set(name):
        yield f"run.name='{name}' cannot be a folder name; use one without slashes, as run.name=my-run"
    elif not name.isprintable() or len(name.encode()) > LONGEST_NAME:
        shown = ascii(name[:40])
        yield f"run.name={shown} names a folder: use at most {LONGEST_NAME} bytes, all of them printable"


def data_rules(config: RunConfig) -> Iterator[str]:
    data, model = config.data, config.model
    trains_tokenizer = data.source == "stdlib" and data.tokenizer is None
    if trains_tokenizer and not 300 <= data.trained_size(model.vocab_size) <= model.vocab_size:
        yield (
            f"data.bpe_vocab_size={data.bpe_vocab_size} must be from 300 to "
            f"model.vocab_size={model.vocab_size}"
        )
    examples = {
        "paths": "e.g. 'data.paths=[corpus/*.jsonl]'",
        "tokenizer": "a tokenizer.json, e.g. the one in the folder of an earlier run",
        "hf_name": "the name or local folder of a dataset",
    }
    ends = {"tokenizer": "whose end token the files have", "document_length": "e.g. 1024"}
    for key in data.source_facts.needs:
        if not getattr(data, key):
            yield f"data.source={data.source} needs data.{key}, {examples[key]}"
    if data.source == "chat" and bool(data.paths) == (data.hf_name is not None):
        given = "both are" if data.paths else "neither is"
        yield f"data.source=chat takes data.paths or data.hf_name, and {given} set; set one of them"
    if data.source_facts.marks and not data.document_mask:
        yield (
            f"data.document_mask=false has no effect on data.source={data.source}, whose documents are "
            f"always apart; use data.document_mask=true"
        )
    end_key = data.source_facts.end_key
    if data.document_mask and end_key and getattr(data, end_key) is None:
        yield (
            f"data.document_mask=true needs a token after each document, and data.source={data.source} has "
            f"none without data.{end_key}; set data.{end_key}, {ends[end_key]}, or use "
            f"data.document_mask=false"
        )
    if data.document_length == 1:
        yield "data.document_length=1 would leave no label; use 2 or more"
    if data.weights and len(data.weights) != len(data.paths):
        yield f"data.weights={data.weights} must have one weight for each of the {len(data.paths)} data.paths"
    elif not all(0 < weight < math.inf for weight in data.weights):
        yield f"data.weights={data.weights} must be greater than 0"
    if data.seq_len is not None and data.seq_len > model.context_length:
        yield (
            f"data.seq_len={data.seq_len} exceeds model.context_length={model.context_length}; use at most "
            f"{model.context_length}, or raise model.context_length"
        )
    if data.seq_len is not None and 0 < data.seq_len <= model.mtp_depth:
        yield (
            f"data.seq_len={data.seq_len} leaves no label for model.mtp_depth={model.mtp_depth}; "
            f"use at least {model.mtp_depth + 1}"
        )


def unread_data_rules(config: RunConfig) -> Iterator[str]:
    """Yield an error for each key of ``data`` that its source ignores: a run would train on other tokens."""
    data, default = config.data, DataConfig()
    for field in dataclasses.fields(data):
        key, value = field.name, getattr(data, field.name)
        if value == getattr(default, key) or not data.source_facts.ignores(key):
            continue
        others = [f"data={name}" for name, facts in SOURCES.items() if not facts.ignores(key)]
        yield (
            f"data.{key}={spelled(value)} has no effect with data={data.source}; add {' or '.join(others)}, "
            f"or leave it out"
        )


_FAULT = re.compile(r"(transient|persistent|data)(:[0-9]{1,9}){2}(:[0-9]{1,9}(\.[0-9]{1,9})?)?")
_TOKENS = re.compile(r"(\d+\.?\d*(?:e\d{1,2})?)([kmbt]?)", re.IGNORECASE)
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def num_tokens(value: Any) -> int | None:
    """Return the number that ``train.tokens`` gives; None if it is not a number of tokens."""
    match = _TOKENS.fullmatch(str(value).replace("+", ""))
    if match is None or isinstance(value, bool):
        return None
    found = Decimal(match[1]) * _SCALES[match[2].lower()]
    return math.ceil(found) if 0 < found <= MOST_TOKENS else None


def with_steps(config: RunConfig) -> RunConfig:
    """Return the configuration with ``train.steps`` computed from a valid ``train.tokens``."""
    train = config.train
    of_step = train.global_batch_size * seq_len_of(config)
    if train.tokens is None or (tokens := num_tokens(train.tokens)) is None or of_step < 1:
        return config
    return dataclasses.replace(config, train=dataclasses.replace(train, steps=-(-tokens // of_step)))


def length_rules(config: RunConfig) -> Iterator[str]:
    train = config.train
    if train.tokens is not None and num_tokens(train.tokens) is None:
        yield (
            f"train.tokens={train.tokens} must be a number of tokens from 1 to {MOST_TOKENS:.0e}, such as "
            f"1e9 or 300M (K, M, B or T)"
        )
    if train.tokens is not None and train.epochs is not None:
        yield (
            f"train.tokens={train.tokens} and train.epochs={train.epochs} both set the length of the run; "
            f"leave one of them out"
        )


def fault_rules(config: RunConfig) -> Iterator[str]:
    fault = config.train.inject_fault
    if fault is not None and not _FAULT.fullmatch(fault):
        yield (
            f"train.inject_fault={ascii(fault)[1:-1]} must be transient, persistent or data, then "
            f":rank:step, and :factor of the loss if it is not NaN, such as transient:1:5 or data:0:40:3"
        )


def lr_schedule_rules(config: RunConfig) -> Iterator[str]:
    """Yield an error if a wsd schedule never decays, or decays during warm-up."""
    optim, total_steps = config.optim, config.train.steps
    fraction, warmup = optim.wsd_decay_fraction, optim.warmup_steps
    if config.train.epochs is not None:
        total_steps = max(total_steps, MOST_TOKENS)  # they are not known yet
    if fraction == 0:
        yield "optim.wsd_decay_fraction=0 never decays; use a share above 0, or optim.schedule=constant"
    if not 0 < fraction <= 1:
        return
    start = optim.decay_steps(total_steps).start
    if start < warmup <= total_steps:
        yield (
            f"optim.warmup_steps={warmup} ends after the decay of optim.schedule={optim.schedule} begins, "
            f"which is step {start} of train.steps={total_steps} "
            f"(optim.wsd_decay_fraction={fraction}); use at most optim.warmup_steps={start}, or "
            f"optim.schedule=cosine"
        )


def checkpoint_rules(config: RunConfig) -> Iterator[str]:
    if config.checkpoint.init_from and config.checkpoint.resume_from:
        yield (
            "checkpoint.init_from takes weights only and checkpoint.resume_from the whole state; "
            "use one of the two"
        )


def precision_rules(config: RunConfig) -> Iterator[str]:
    precision = config.precision
    key = f"precision.fp8={precision.fp8.value}"
    unknown = [name for name in precision.fp8_products if name not in FP8_PRODUCTS]
    if unknown:
        choices = nearest(unknown[0], FP8_PRODUCTS)
        yield f"precision.fp8_products={precision.fp8_products} has {', '.join(unknown)}{choices}"
    elif not precision.fp8_products:
        some = ", ".join(FP8_PRODUCTS)
        yield f"precision.fp8_products=[] is empty; use some of {some}, or precision.fp8=none"
    count, skipped = config.model.num_layers + config.model.mtp_depth, precision.fp8_skip_layers
    bad = [str(layer) for layer in skipped if not -count <= layer < count]
    if bad and count > 0:
        yield f"precision.fp8_skip_layers={skipped} has {', '.join(bad)}; use {-count} to {count - 1}"
    if precision.fp8 is Fp8Recipe.none:
        return
    by = FORMATS[precision.fp8]
    if not bad and 0 < count == len({layer % count for layer in skipped}):
        yield f"precision.fp8_skip_layers={skipped} skips all layers; skip fewer, or use precision.fp8=none"
    in_fp8 = "experts" in precision.fp8_products and has_experts(config.model)
    others = ",".join(name for name in precision.fp8_products if name != "experts")
    without = f", or precision.fp8_products=[{others}]" if others else ""
    inner = config.model.expert_ffn_size // max(config.parallel.etp, 1)
    uneven = {"model.hidden_size": config.model.hidden_size, "model.expert_ffn_size of a rank": inner}
    if by.is_delayed and config.parallel.dp_shard is DpShard.fsdp2:
        yield (
            f"{key} has one scale for each whole weight, but parallel.dp_shard=fsdp2 shards weights; "
            f"use precision.fp8=rowwise, or parallel.dp_shard=zero1"
        )
    vendor = experts_of(config).fp8_vendor
    if in_fp8 and by.why_no_experts and vendor is None:
        yield f"{key} {by.why_no_experts}; use precision.fp8=rowwise{without}"
        in_fp8 = False
    for name, size in uneven.items() if in_fp8 else ():
        if size % by.aligned:
            even = -(-size // by.aligned) * by.aligned
            yield f"{key} of experts needs multiples of {by.aligned}, and {name} is {size}; use {even}"
    if not config.compile.enabled:
        yield f"{key} needs compiled units, but compile.enabled=false; use compile.enabled=true"
    else:
        ours = bool(others) or vendor is None
        passes = [*["fp8_quantise"] * ours, *["fp8_linear"] * bool(others), *["fp8_experts"] * in_fp8]
        off = [name for name in passes if not runs_pass(config.passes, name)]
        if off:
            yield (
                f"{key} needs the passes {', '.join(off)}, which passes.enabled or passes.disabled "
                f"leaves out; let them run, or use precision.fp8=none"
            )
    if config.compile.enabled and in_fp8 and config.moe.dispatcher == "alltoall":
        yield (
            f"{key} needs compiled experts, which moe.dispatcher=alltoall does not have; use "
            f"moe.dispatcher=symm{without}"
        )


def graph_rules(config: RunConfig) -> Iterator[str]:
    scope = config.graph.scope
    words = ", ".join([*SCOPES, FULL_ITERATION, "auto"])
    if isinstance(scope, str):
        known = scope in SCOPES or scope == FULL_ITERATION
        bad = [] if known else [scope]
    else:
        names = scope if isinstance(scope, list) else [scope]
        bad = [str(name) for name in names if name not in CAPTURABLE]
    if scope == []:
        yield f"graph.scope=[] names no segment; use graph.scope=none, or one of {words}"
    elif isinstance(scope, str) and scope in CAPTURABLE:
        yield f"graph.scope={scope} is one segment; name it in a list: 'graph.scope=[{scope}]'"
    elif bad:
        yield (
            f"graph.scope={scope} has {', '.join(bad)}; use one of {words}, or a list of segments: "
            f"{', '.join(CAPTURABLE)}"
        )
    elif isinstance(scope, list) and len(set(scope)) < len(scope):
        yield f"graph.scope={scope} names a segment twice; name each once"
    elif not config.compile.enabled and segments_of(scope):
        yield (
            f"graph.scope={scope} captures compiled segments, and compile.enabled=false; use "
            f"compile.enabled=true, graph.scope={FULL_ITERATION} or graph.scope=none"
        )
    elif segments_of(scope) and not {*segments_of(scope)} - OF_MOE and not has_experts(config.model):
        yield (
            f"graph.scope={scope} captures segments of MoE layers, and the model has none; use "
            f"graph.scope=layer, {FULL_ITERATION} or none"
        )


def profile_rules(config: RunConfig) -> Iterator[str]:
    steps, ranks, total = config.profile.steps, config.profile.ranks, config.train.steps
    if not steps:
        return
    if config.train.epochs is not None:
        total = MOST_TOKENS  # it is not known yet
    if len(steps) > 2:
        yield f"profile.steps={steps} has {len(steps)} numbers; use the first and the last, or one"
        return
    first, last = steps[0], steps[-1]
    if first < 1 or last < first:
        yield f"profile.steps={steps} must be the first and the last step, counted from 1, e.g. [10,12]"
    elif last > total:
        inside = [min(first, total), total] if first < total else [total]
        yield f"profile.steps={steps} goes beyond train.steps={total}; use at most {inside}"
    if not ranks or min(ranks) < 0 or len({*ranks}) < len(ranks):
        yield f"profile.ranks={ranks} must be ranks, counted from 0, each once; [0] is the default"
    if config.launch.fake_world is not None:
        yield (
            f"profile.steps={steps} measures steps, and launch.fake_world={config.launch.fake_world} runs "
            f"none; leave one of them out"
        )


def launch_rules(config: RunConfig) -> Iterator[str]:
    launch = config.launch
    for key, value in (("nproc", launch.nproc), ("nodes", launch.nodes)):
        if value != "auto" and (type(value) is not int or value < 1):
            yield f"launch.{key}={value!r} must be auto or a number greater than 0"
    host, _, port = (launch.endpoint or "").rpartition(":")
    is_host = host != "" and host.isprintable() and not set(host) & {" ", "/"}
    is_port = port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 2**16
    if launch.endpoint is not None and not (is_host and is_port):
        yield (
            f"launch.endpoint={ascii(launch.endpoint)[1:-1]} must be host:port with a port from 1 to 65535, "
            f"e.g. launch.endpoint=node0:29500"
        )


def dry_run_rules(config: RunConfig) -> Iterator[str]:
    launch = config.launch
    world = launch.fake_world
    if world is None or world < 1:
        return
    counts = [count for count in (launch.nproc, launch.nodes) if type(count) is int]
    if counts not in ([], [1], [1, 1]) and math.prod(counts) != world:
        yield (
            f"launch.fake_world={world} sets the number of ranks, and launch.nproc={launch.nproc} with "
            f"launch.nodes={launch.nodes} another one; leave those two out"
        )
    if launch.fake_rank is not None and not 0 <= launch.fake_rank < world:
        yield (
            f"launch.fake_rank={launch.fake_rank} is not among the ranks of launch.fake_world={world}; use "
            f"0 to {world - 1}"
        )
    if launch.write_only:
        yield (
            f"launch.write_only=true writes a run that others start, and launch.fake_world={world} starts "
            f"none; leave one of them out"
        )


def with_dry_batch(config: RunConfig) -> RunConfig:
    """Return the configuration with a dry run's default global batch.

    One micro-batch per dp rank; with pp ``pipeline.microbatches``, or four per pipeline rank.
    """
    launch, train, parallel = config.launch, config.train, config.parallel
    if launch.fake_world is None or train.global_batch_size != TrainConfig.global_batch_size:
        return config
    try:
        together = assumed_size(config) * Layout.of(parallel, launch.fake_world).dp
    except (ConfigError, ZeroDivisionError):  # other rules refuse these
        return config
    count = config.pipeline.microbatches or ROUNDS * parallel.pp if parallel.pp > 1 else 1
    # a given batch that does not divide is refused, as in a run
    if min(together, count) < 1 or (parallel.pp == 1 and train.global_batch_size % together == 0):
        return config
    train = dataclasses.replace(train, global_batch_size=together * count)
    return dataclasses.replace(config, train=train)
