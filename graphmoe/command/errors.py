"""Messages for configuration errors: the key, its file, and the nearest valid key."""

import dataclasses
import difflib
import functools
import os
import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import graphmoe.conf
from graphmoe.config.arguments import near_path
from graphmoe.config.packages import PLUGINS
from graphmoe.config.ranges import NEED_GPU, OWN_CODE, OneOf, field_of, fields_of, type_rules
from graphmoe.config.schema import RunConfig

CONF = Path(graphmoe.conf.__path__[0])


def explain(error: BaseException, argv: Sequence[str]) -> str:
    """Return one message for an error of Hydra or OmegaConf: what was asked, what is wrong, what to type."""
    # A folder of the user's own may add options to a group: Hydra knows those, this module does not.
    own_folder = _has_own_folder(argv)
    overrides, unreadable = parsed(argv)
    unknown = [text for override in overrides for text in _unknown(override, own_folder)]
    chain = list(_chain(error))
    missing = next((e for e in chain if isinstance(e, MissingConfigException) and e.options), None)
    if not (missing and own_folder) and (unknown or unreadable):
        return "; ".join(unknown) or str(unreadable)
    plugin = re.search(r"Could not (?:find|load) 'hydra/(\w+/\w+)'", str(error))
    if plugin and plugin[1] in PLUGINS:
        asked = plugin[1].replace("/", "=")
        return f"hydra/{asked} is a plugin that is not installed; {PLUGINS[plugin[1]].install}"
    file = next((m[1] for e in chain if (m := re.search(r"In '([^']+)'", str(e)))), None)
    if missing:
        return _missing_option(missing, overrides, file)
    for cause in reversed(chain):
        stated = re.search(r"^ *full_key: (\S+)$", str(cause), re.MULTILINE)  # of what Python raises
        key = getattr(cause, "full_key", None) or (stated and stated[1])
        if not key or key == "_dummy_":  # Hydra's, for a group's option
            continue
        if file and key in groups() and key not in known_keys():  # Hydra put its keys below the group's name
            return f"{file}.yaml: its first line must be '# @package _global_', so that its keys are a run's"
        if key not in known_keys() and file:
            return f"unknown key '{key}' in {file}.yaml{_instead(key)}"
        return _misfit(key, cause, f"in {file}.yaml" if file else "on the command line")
    text = "\n  ".join(line.strip() for line in str(error).splitlines() if line.strip())
    own = " ".join(word for word in argv if word.lstrip("+~").startswith("hydra"))
    if own and not isinstance(error, (HydraException, yaml.YAMLError)):  # which say what they are about
        return f"{own} cannot be used: {text or type(error).__name__}"
    return text


def with_plain_groups(argv: Sequence[str]) -> list[str]:
    """Return ``+experiment=x`` as ``experiment=x``, and ``experiment/sweep=x`` as ``experiment=sweep/x``."""
    named = "|".join(name for name in groups() if name != "hydra")
    plain = (re.sub(rf"^\+({named})=", r"\1=", word) for word in argv)
    return [re.sub(r"^\+?experiment/([\w/]+)=", r"experiment=\1/", word) for word in plain]


def wrong_words(argv: Sequence[str]) -> str | None:
    """Return what is wrong with the overrides; None if nothing, or if a --config-dir may add options."""
    overrides, unreadable = parsed(argv)
    if _has_own_folder(argv):
        return None
    unknown = [text for override in overrides for text in _unknown(override, False)]
    wrong = unknown or [text for override in overrides for text in _wrong_value(override)]
    return "; ".join(wrong) or unreadable


def _has_own_folder(argv: Sequence[str]) -> bool:
    own = ("--config-", "-cd", "-cp", "-cn", "hydra.searchpath", "+hydra.searchpath", "--experimental-rerun")
    return any(word.startswith(own) for word in argv)


def _wrong_value(override: Override) -> Iterator[str]:
    section, _, name = str(override.key_or_group).partition(".")
    kind = typing.get_type_hints(RunConfig).get(section)
    is_plain = not override.is_sweep_override() and not override.is_delete()
    if not is_plain or not dataclasses.is_dataclass(kind) or name not in typing.get_type_hints(kind):
        return
    value = override.value()
    if "${" in str(value) or isinstance(value, dict):
        return
    try:
        merged = OmegaConf.merge(OmegaConf.structured(kind), {name: value})
    except (OmegaConfBaseException, ArithmeticError) as error:
        answer = answer_to(str(value))
        yield _misfit(f"{section}.{name}", error, "on the command line") + (f"; {answer}" if answer else "")
        return
    typed = OmegaConf.to_container(merged)
    assert isinstance(typed, dict) and isinstance(kind, type)
    field = field_of(kind, name, f"{section}.{name}", typed[name])
    rows = [mark.names for mark in field.marks if isinstance(mark, OneOf) and mark.names]
    if rows and value not in rows[0] and (answer := answer_to(str(value), rows[0])):
        yield f"{section}.{name}={value} on the command line: {answer}"
    else:
        yield from type_rules(field)


def _misfit(key: str, cause: BaseException, where: str) -> str:
    text = str(getattr(cause, "msg", None) or cause).splitlines()[0]
    if "ListConfig" in text:
        text = f"a list is wanted; type it in brackets and quotes: '{key}=[a,b]'"
    text = re.sub(rf"\b({'|'.join(NEED_GPU)})(?=[],])", r"\1 (on a GPU)", text)  # in a list of choices
    return f"{key} {where}: {text}"


def known_keys() -> list[str]:
    return [*typing.get_type_hints(RunConfig), *(field.key for field in fields_of(RunConfig()))]


USUAL_NAMES = {
    "batch_size": "train.global_batch_size", "gradient_accumulation_steps": "train.micro_batch_size",
    "device": "run.device", "output_dir": "run.name", "dtype": "precision.compute", "seed": "train.seed",
    "learning_rate": "optim.lr", "resume": "checkpoint.resume",
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "train.epochs"),
    **dict.fromkeys(("iterations", "max_steps", "num_steps", "steps"), "train.steps"),
    **dict.fromkeys(("max_tokens", "num_tokens"), "train.tokens"),
    **dict.fromkeys(("seq_length", "sequence_length"), "data.seq_len"),
    "intermediate_size": "model.dense_ffn_size", "num_hidden_layers": "model.num_layers",
    "full_attention_interval": "model.full_every",
    "max_position_embeddings": "model.context_length", "num_attention_heads": "model.num_heads",
    **dict.fromkeys(("qkv_bias", "add_qkv_bias"), "model.attention_bias"),
}  # fmt: skip
"""Names that other trainers give to keys."""
_CHAT = "data=chat trains on answers alone, or as data.train_on says, which is assistant, all or field"
ANSWERS = {
    "q?lora|dora|peft|adapters?": "model.lora_rank=8 trains LoRA adapters beside the frozen weights of "
    "checkpoint.init_from=FOLDER; there are no other adapters",
    r"reset_\w+|eod_mask_loss|doc\w*_mask": "data.document_mask=true keeps attention, positions and losses "
    "within a document",
    r"\w*masks?|ignore_index|\w*on_(?:inputs|completions)\w*": f"{_CHAT}; data.document_mask=true keeps "
    "attention and losses within a document of other sources",
    "dpo|ppo|grpo|rlhf|rewards?|preferences?": "graphmoe.Trainer, of the Python API, steps a loss of "
    "your own, such as one of rewards or preferences",
    "muon": "optim=muon updates matrices by Muon and the rest by AdamW; its keys are those of optim",
    "shampoo|soap|lion|adafactor|sgd|adam(?!_beta|_eps)|sophia|adam_?8bit": "the optimizers are optim=adamw "
    "and optim=muon; a rule of your own is optim.name=package.module:NAME",
    r"llama_?4\w*": "model=llama4_scout and llama4_maverick are the text models of Llama 4",
    r"dbrx|grok|olmoe|jamba|hunyuan\w*": "this family is not there; those that "
    "are: DeepSeek-V2 and V3, Kimi-K2, Moonlight, Qwen3, Qwen3-MoE, Qwen3-Next, Qwen3.5, Mixtral, GLM-4.5, "
    "Ling 2.0, MiniMax-M2, gpt-oss, Llama 3 and Llama 4",
    r"qwen3_next\w*": "model=qwen3_next_80b_a3b is there",
    r"qwen3_5\w*": "model=qwen3_5_35b_a3b is there",
    r"gpt_?oss\w*": "model=gpt_oss_20b, gpt_oss_120b and gpt_oss_20b_mlperf are there",
    r"glm\w*": "model=glm_4_5_air is there",
    r"ling\w*": "model=ling_mini_2 and ling_flash_2 are there",
    r"minimax\w*": "model=minimax_m2 is there",
    r"llama|gemma|mistral|phi|falcon|gpt_?(?:2|neox?)|olmo|qwen2": "the dense families are Llama 3, as "
    "model=llama3_8b, and Qwen3, as model=qwen3_8b; others are not there",
    r"sft|fine_?tun\w*|instruct\w*|chat\w*": f"{_CHAT}; checkpoint.init_from=FOLDER goes on with weights",
    r"deepspeed|zero|zero_(?:stage|opt)\w*|fsdp\w*|full_shard": "parallel.dp_shard=zero1, the default, "
    "shards the optimizer's state, optim.grad_shard=true gradients too, as ZeRO-2, and "
    "parallel.dp_shard=fsdp2 weights too, as ZeRO-3",
    r"\w*offload\w*": "optim.offload=true keeps master weights and moments in the host's memory, "
    "recompute.offload=[attn,moe_experts] saved activations; recompute=all and parallel.dp_shard=fsdp2 need "
    "less of the GPU's",
    r"\w*dropout\w*": "there is no dropout; optim.weight_decay=0.1 regularizes",
    r"(?:gradient|activation)_checkpoint\w*|checkpoint_activations|remat": "recompute=all computes layers "
    "again in the backward; recompute.segments and recompute.ops choose parts",
    "fp8|float8": "precision.fp8=rowwise quantizes products to 8 bits, beside precision.compute=bf16",
    r"(?:nv|mx)?fp4|\w*int[48]|\w*[48]_?bit|bitsandbytes|gptq|awq": "weights are not quantized for training; "
    "precision.fp8=rowwise quantizes products to 8 bits",
    "bf16|bfloat16": "precision=bf16 is the default on a GPU, precision=fp32 on a CPU",
    "num_gpus|gpus|n_gpus": "launch.nproc is the number of GPUs of a node, launch.nodes that of nodes",
    "config_file|config_path|config": "--config-dir and --config-name read a file of your own; "
    "conf/experiment has examples, whose first line is # @package _global_",
    "fp16|float16|half|amp": "there is no fp16; precision=bf16 is the default on a GPU",
    r"flash\w*|xformers|attn_implementation": "model.attention_backend=auto is the fastest kernel",
    "accelerate|ddp|lightning|horovod|ray": "launch.nproc=8 starts a process for each GPU, launch.nodes=2 on "
    "more nodes; torchrun, srun and mpirun work too",
    r"\w*packing": "samples are always packed: documents end to end, cut at data.seq_len; "
    "data.document_mask=true keeps attention within a document",
    "capacity_factor|drop_tokens|token_drop": "no token is dropped; moe.receive_budget bounds memory",
    r"no_?rope\w*|nope\w*|attention_chunk_size": "model.nope_every=4 leaves every fourth layer without "
    "rotary embedding, model.attention_chunk=8192 limits the keys of the others, with model.attention=gqa",
    r"\w*moe_layer_(?:freq|step)|decoder_sparse_step": "model.moe_every=2 gives every second layer experts; "
    "model.num_dense_layers=1 makes leading layers dense",
    "sliding_window|window": "model.window=128 with model.attention=gqa; model.full_every=2 leaves "
    "every second layer whole",
    "ema": "there is no average of weights over steps",
}
"""Replies about features that people type as keys or values, by regular expression of the name."""


def answer_to(word: str, valid: Sequence[str] = ()) -> str | None:
    """Return `ANSWERS`' reply to a name such as fp16; None without one, or for a misspelt ``valid`` word."""
    if difflib.get_close_matches(word, valid, n=1, cutoff=0.85):
        return None
    plain = "_" + re.sub(r"\W+", "_", word.lower()) + "_"
    return next((text for names, text in ANSWERS.items() if re.search(rf"_(?:{names})\d*_", plain)), None)


def _instead(key: str, valid: Sequence[str] = ()) -> str:
    answer = answer_to(key, [*known_keys(), *valid])
    close = difflib.get_close_matches(key, valid, n=1, cutoff=0.6)
    return f": {answer}" if answer else f"; did you mean '{close[0] if close else nearest_key(key)}'?"


def nearest_key(key: str) -> str:
    """Return the most likely key: by its last part, a name in other trainers, or its spelling."""
    last = key.split(".")[-1]
    same_word = [k for k in known_keys() if k.endswith(f".{last}")]
    if key in same_word:
        return key
    if last in USUAL_NAMES or len(same_word) == 1:
        return USUAL_NAMES.get(last) or same_word[0]
    section = key.split(".")[0]
    same_section = [k for k in known_keys() if k.startswith(f"{section}.")]
    leaf = key.split(".")[1] if "." in key else key
    if same_section:
        by_leaf = {k.split(".")[-1]: k for k in same_section}
        close = difflib.get_close_matches(leaf, list(by_leaf), n=1, cutoff=0.0)
        return by_leaf[close[0]]
    candidates = [k for k in known_keys() if ("." in k) == ("." in key)]
    return difflib.get_close_matches(key, candidates, n=1, cutoff=0.0)[0]


def _unknown(override: Override, own_folder: bool) -> Iterator[str]:
    key = str(override.key_or_group)
    line = override.input_line or ""
    if key.split(".")[0].split("/")[0] in ("hydra", "format"):
        return
    if key in groups() and override.is_delete():
        return
    if key in groups():
        there = options(key)
        value = override.value()
        asked = [] if override.is_sweep_override() else value if isinstance(value, list) else [value]
        for one in asked:
            option = "null" if one is None else str(one)
            own = [f"{name}={option}" for name in _code_keys(key)] if OWN_CODE.fullmatch(option) else []
            if own:
                yield (
                    f"'{line}' on the command line: there is no {key} '{option}'; code of your own is the "
                    f"value of a key: {' or '.join(own)}"
                )
            elif there and option not in there and (one is None or not own_folder):
                if key == "model" and is_model_folder(option):
                    continue
                yield _no_option(f"'{line}' on the command line", key, option, there)
    elif key not in known_keys() and not key.startswith("host.env."):
        if "." in key or key in {k.split(".")[0] for k in known_keys()}:
            yield f"unknown key '{key}' on the command line ('{line}'){_instead(key)}"
        else:
            yield f"unknown key or group '{key}' on the command line ('{line}'){_instead(key, groups())}"


def is_model_folder(name: str) -> bool:
    """Return whether ``model=name`` names a folder instead of a preset; `read_words` reads its model."""
    return "${" not in name and name not in options("model") and os.path.isdir(os.path.expanduser(name))


def _missing_option(error: MissingConfigException, overrides: Sequence[Override], file: str | None) -> str:
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    if (outer := group.partition("/")[0]) in groups() and outer != "hydra":
        group, option = outer, str(error.missing_cfg_file).removeprefix(f"{outer}/")
    words = (o.input_line or "" for o in overrides if o.key_or_group == group)
    word = next((word for word in words if option in word), None)
    there = sorted({*(error.options or ()), *options(group)})
    # Hydra names the file config for every override, whichever file has it.
    at = "in a list of defaults" if file == "config" else f"in {file}.yaml"
    return _no_option(f"'{word}' on the command line" if word else at, group, option, there)


def _no_option(where: str, group: str, option: str, there: Sequence[str]) -> str:
    if answer := answer_to(option, there):
        return f"{where}: there is no {group} '{option}': {answer}"
    if group == "model" and os.path.isfile(path := os.path.expanduser(option)):
        use = f"text is read by data=files 'data.paths=[{option}]'"
        if path.endswith((".yaml", ".yml")):
            use = f"--config-dir DIR experiment={Path(path).stem} reads it from DIR/experiment"
        return f"{where}: {option} is a file, and a model is a preset or a folder; {use}"
    listed = ", ".join(there)
    if group == "model" and "/" in option:
        instead = near_path(option) or f"; give a folder with config.json, or one of {listed}"
        return f"{where}: there is no folder '{option}'{instead}"
    close = difflib.get_close_matches(option, there, n=1, cutoff=0.0)[0]
    return f"{where}: there is no {group} '{option}'; did you mean {group}={close}? (options: {listed})"


def _code_keys(section: str) -> list[str]:
    fields = (field for field in fields_of(RunConfig()) if field.key.startswith(f"{section}."))
    return [field.key for field in fields if any(isinstance(mark, OneOf) for mark in field.marks)]


def parsed(argv: Sequence[str]) -> tuple[list[Override], str | None]:
    """Return the overrides that Hydra can parse, and an error for the first that lacks quotes."""
    parser = OverridesParser.create()
    found, unreadable = list[Override](), None
    for word in argv:
        key, equals, value = word.partition("=")
        if (not equals and not word.startswith("~")) or word.startswith("-"):
            continue
        try:
            found.append(parser.parse_override(word))
        except HydraException:
            quoted = value.strip("'\"").replace("'", "\\'")
            unreadable = unreadable or (
                f"{key}={value} on the command line cannot be read: its value needs quotes of its own inside "
                f"those of the shell, as in \"{key}='{quoted}'\""
            )
    return found, unreadable


@functools.cache
def groups() -> list[str]:
    return sorted(p.name for p in CONF.iterdir() if p.is_dir() and not p.name.startswith("_"))


def options(group: str, own: Sequence[Path] = ()) -> list[str]:
    """Return a group's options, also from the folders ``own``; experiments include their subfolder."""
    pattern = "**/*.yaml" if group == "experiment" else "*.yaml"
    tops = [folder / group for folder in (CONF, *own)]
    return sorted({str(file.relative_to(top).with_suffix("")) for top in tops for file in top.glob(pattern)})


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__
