"""Chat templates in the forms of published ones, conversations, and a folder with tokenizer and template."""

import json
import random
from pathlib import Path

from tokenizers import AddedToken

from graphmoe.data.tokenizer import train_bpe
from tests.data.texts import sentences

SPECIALS = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
OTHERS = ("<|im_start|>", "<|eot|>", "<|head|>", "<|/head|>")

CHATML = r"""{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
LLAMA = r"""{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system, rest = messages[0].content | trim, messages[1:] %}
{%- else %}{% set system, rest = 'Be brief.', messages %}{% endif %}
{{- '<|head|>system<|/head|>\n\nToday: ' ~ (strftime_now('%Y') if strftime_now is defined else '?') }}
{{- '\n' + system + '<|eot|>' }}
{%- for message in rest %}
    {%- if message.role not in ['user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}
    {{- '<|head|>' + message.role + '<|/head|>\n\n' + message.content | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}
"""
TOOLS = r"""{%- set ns = namespace(last=none, tool=false) %}
{%- if tools %}
{{- '<|im_start|>system\n# Tools\n' }}{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if not ns.tool %}{{ '<|im_start|>user' }}{% endif %}
        {%- set ns.tool = true %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index].role != 'tool' %}
            {{- '<|im_end|>\n' }}{% set ns.tool = false %}
        {%- endif %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.reasoning_content is defined %}{{ '<think>' + message.thinking + '</think>\n' }}{% endif %}
    {%- if message.content %}{{ message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {%- set call = call.function if call.function is defined else call %}
        {{- '\n<tool_call>\n' }}{{ {'name': call.name, 'arguments': call.arguments} | tojson(indent=1) }}
        {{- '\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
GENERATION = r"""{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "tools": TOOLS, "generation": GENERATION}

TOOL = {"type": "function", "function": {"name": "sum", "parameters": {"a": {"type": "int"}, "\u00e9": []}}}
CALL = {"type": "function", "function": {"name": "sum", "arguments": {"a": 1, "b": [2, "\u00fc <x>"]}}}
TALK = [
    {"role": "system", "content": " the loss of "},
    {"role": "user", "content": "an expert is\nshown"},
    {"role": "assistant", "content": "  for each token "},
    {"role": "user", "content": "and \u00e9\u00e8 <b>router</b>?"},
    {"role": "assistant", "content": "while gradients"},
]
CALLS = [
    {"role": "user", "content": "wait in line"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL], "reasoning": "the token"},
    {"role": "tool", "content": "3", "name": "sum"},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "loss"},
]


def write_tokenizer(folder: Path, template: object = CHATML, *, beside: bool = False) -> Path:
    """A folder with a small tokenizer, its special tokens, and its template in one of both places."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_bpe(iter(sentences(100)), 350, 100)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (*SPECIALS.values(), *OTHERS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(SPECIALS, pad_token={"__type": "AddedToken", "content": SPECIALS["pad_token"]})
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    if beside:
        (folder / "chat_template.jinja").write_text(str(template))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | ({} if beside else {"chat_template": template}))
    )
    return folder


def conversations(count: int, seed: int = 0, longest: int = 3) -> list[dict[str, object]]:
    """Rows of messages; each has up to ``longest`` pairs of a question and an answer."""
    rng, texts = random.Random(seed), sentences(40, seed)
    rows = []
    for _ in range(count):
        pairs = [(rng.choice(texts)[:30], rng.choice(texts)[:40]) for _ in range(rng.randint(1, longest))]
        talk = [
            {"role": role, "content": text} for pair in pairs for role, text in zip(ROLES, pair, strict=True)
        ]
        rows.append({"messages": talk})
    return rows


ROLES = "user", "assistant"


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
