"""Rendering of chat templates: as transformers, and harmless if the template is hostile."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from graphmoe.config.schema import ConfigError, DataConfig
from graphmoe.data import chat_renderer
from graphmoe.data.chat_renderer import Template
from graphmoe.data.chat_template import ChatTemplate, Renderer, TemplateFault, chat_template
from tests.data.chats import (
    CALLS,
    CHATML,
    GENERATION,
    SPECIALS,
    TALK,
    TEMPLATES,
    TOOL,
    TOOLS,
    write_tokenizer,
)

every = pytest.mark.parametrize("name", TEMPLATES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("chat") / "tokenizer")


def found_template(folder, **keys):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return chat_template(DataConfig("chat", tokenizer=str(folder), **keys), tokenizer)


def renderer_of(source, folder):
    return Renderer(found_template(folder)._replace(source=source))


@pytest.fixture
def rendered():
    opened = []

    def render(source, messages=TALK, wanted=(), tools=None, specials=()):
        opened.append(Renderer(ChatTemplate("t.jinja", source, SPECIALS, [*specials])))
        return opened[-1](messages, tools, [*wanted])

    yield render
    [each.close() for each in opened]


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("talk", [TALK, CALLS], ids=["talk", "calls"])
@every
def test_a_text_is_the_one_of_transformers(folder, name, talk, prompt):
    transformers = pytest.importorskip("transformers")
    if talk is CALLS and name != "tools":
        talk = CALLS[:1]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    tools = [TOOL] if talk is CALLS else None
    expected = theirs.apply_chat_template(
        talk, tools, chat_template=TEMPLATES[name], add_generation_prompt=prompt, tokenize=False
    )
    ours = Template(TEMPLATES[name], found_template(folder).variables)
    shown = [{key: value for key, value in message.items() if value is not None} for message in talk]
    assert ours.render(shown, tools, prompt=prompt)[0] == expected and len(expected) > 20
    if not prompt:
        with_process = renderer_of(TEMPLATES[name], folder)
        assert with_process(shown, tools, [])[0] == expected
        with_process.close()


def test_generation_blocks_are_the_mask_of_transformers(folder, rendered):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    asked = {"return_assistant_tokens_mask": True, "return_dict": True, "chat_template": GENERATION}
    expected = theirs.apply_chat_template(TALK, **asked)
    text, spans = rendered(GENERATION, TALK, [2, 4])
    encoding = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False)
    mask = [int(any(a < stop and b > start for start, stop in spans)) for a, b in encoding.offsets]
    assert encoding.ids == expected["input_ids"] and mask == expected["assistant_masks"]
    assert 0 < sum(mask) < len(mask)


@every
def test_spans_are_answers_with_their_ends(name, rendered):
    text, spans = rendered(TEMPLATES[name], TALK, [2, 4], specials=["<|im_end|>", "<|eot|>"])
    end = "<|eot|>" if name == "llama" else "<|im_end|>"
    answers = (
        ["for each token", "while gradients"] if name == "llama" else [TALK[2]["content"], "while gradients"]
    )
    assert [text[start:stop] for start, stop in spans] == [answer + end for answer in answers]
    assert rendered(TEMPLATES[name], TALK, [4], specials=["<|im_end|>", "<|eot|>"]) == (text, spans[1:])


def test_spans_of_calls_are_whole_answers(rendered):
    shown = [{key: value for key, value in message.items() if value is not None} for message in CALLS]
    text, ((start, stop), last) = rendered(TOOLS, shown, [1, 4], [TOOL], ["<|im_end|>"])
    assert text[start:stop].startswith("<think>the token</think>\n\n<tool_call>\n{")
    assert text[start:stop].endswith("</tool_call><|im_end|>") and text[slice(*last)] == "loss<|im_end|>"


def test_a_generation_block_whose_place_is_unknown_is_refused():
    block = "{% generation %}{{ messages[0].content }}{% endgeneration %}"
    held = "{% set kept %}head " + block + "{% endset %}{{ kept }}"
    with pytest.raises(
        chat_renderer.TemplateError,
        match="generation blocks in macros, set blocks or filters have no position",
    ):
        Template(held, {}).render([{"role": "assistant", "content": "yes"}])
    assert Template("head " + block, {}).render([{"role": "assistant", "content": "yes"}])[1] == [(5, 8)]


def test_messages_that_change_with_later_ones_are_refused_by_cause_and_remedy(rendered):
    brief = "(message['content'] if loop.last or message.role != 'assistant' else '...') +"
    changing = CHATML.replace("message['content'] +", brief)
    with pytest.raises(TemplateFault, match="message 3 is rendered in another way if messages f.*end the"):
        rendered(changing, TALK, [2])
    assert rendered(changing, TALK, [4])[1]
    headless = CHATML.replace("assistant\\n", "assistant says ")
    with pytest.raises(TemplateFault, match="message 5 is rendered without the head of an an.*generation"):
        rendered(headless, TALK, [4])


@pytest.mark.parametrize("beside", [False, True])
def test_a_template_is_found_beside_the_tokenizer(tmp_path, beside):
    found = found_template(write_tokenizer(tmp_path / "a", CHATML, beside=beside))
    assert found.source == CHATML and found.variables == SPECIALS and "<|im_start|>" in found.specials
    (tmp_path / "own.jinja").write_text("own")
    assert found_template(tmp_path / "a", chat_template=str(tmp_path / "own.jinja")).source == "own"


def test_of_named_templates_the_default_is_taken(tmp_path):
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    assert found_template(write_tokenizer(tmp_path / "a", named)).source == "yes"
    with pytest.raises(ConfigError, match="has the chat templates rag, and none is named default; write"):
        found_template(write_tokenizer(tmp_path / "b", named[:1]))
    with pytest.raises(ConfigError, match="has no chat template: neither .*; set data.chat_template=FILE"):
        found_template(write_tokenizer(tmp_path / "c", None))
    with pytest.raises(ConfigError, match="data.chat_template=.*none is not a file"):
        found_template(tmp_path / "a", chat_template=str(tmp_path / "none"))


TWICE, ENDS = "{% for i in range(99999) %}" * 2, "{% endfor %}" * 2
HOSTILE = {
    "class": ("{{ ''.__class__.__mro__ }}", "SecurityError: access to attribute '__class__'"),
    "globals": ("{{ raise_exception.__globals__['sys'] }}", "is undefined|is unsafe"),
    "format": ("{{ ('{0.__class__.__mro__}' | format)(messages) }}", "not callable"),
    "mutation": ("{{ messages.append(1) }}", "SecurityError: access to attribute 'append'"),
    "namespace": ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "SecurityError: a namespace"),
    "file": ("{% include '/etc/passwd' %}", "no loader"),
    "range": ("{% for i in range(10 ** 9) %}x{% endfor %}", "OverflowError: Range too big"),
    "output": ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "more than 4,000,000 characters"),
    "memory": ("{{ messages[0].content * 10 ** 9 }}", "MemoryError"),
    "doubling": (
        "{% set n = namespace(s='ab') %}{% for i in range(70) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "MemoryError",
    ),
    "blocks": (
        "{% for i in range(99999) %}{% generation %}{% endgeneration %}" * 2 + "{% endfor %}" * 2,
        "more",
    ),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "exception": ("{{ raise_exception('a\n\x1b[31mb') }}", "^a .31mb$"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused(name, rendered):
    source, message = HOSTILE[name]
    with pytest.raises(TemplateFault, match=message):
        rendered(source)


LOOP = (
    "{% if messages | length > 1 %}"
    + "{% for i in range(99999) %}" * 3
    + "{% endfor %}" * 3
    + "{% endif %}ok"
)


def test_an_endless_loop_ends_one_conversation_alone(monkeypatch, tmp_path):
    """The renderer's file with a shorter limit; the next conversation has a process of its own."""
    file, source = tmp_path / "renderer.py", Path(chat_renderer.__file__).read_text()
    assert "MAX_CPU_S = 10.0" in source
    file.write_text(source.replace("MAX_CPU_S = 10.0", "MAX_CPU_S = 0.5"))
    monkeypatch.setattr(chat_renderer, "__file__", str(file))
    render = Renderer(ChatTemplate("t.jinja", LOOP, {}, []))
    with pytest.raises(TemplateFault, match="takes more than 10 s of a processor"):
        render(TALK, None, [])
    assert render(TALK[:1], None, [])[0] == "ok"
    render.close()


def test_the_process_opens_no_file_and_has_few_variables(tmp_path, monkeypatch):
    """What a template that left the sandbox finds: a program in place of the renderer's loop."""
    probe = (
        "\n    found = {'env': sorted(os.environ)}"
        "\n    for name, act in {'file': lambda: open('x', 'w'), 'socket': socket.socket}.items():"
        "\n        try: act(); found[name] = 'opened'"
        "\n        except OSError as error: found[name] = error.strerror"
        "\n    print(json.dumps({'error': json.dumps(found)}), flush=True)"
    )
    source = Path(chat_renderer.__file__).read_text()
    (tmp_path / "renderer.py").write_text(
        source.replace("    _limit()\n", f"    import os, socket\n    _limit(){probe}\n")
    )
    monkeypatch.setattr(chat_renderer, "__file__", str(tmp_path / "renderer.py"))
    monkeypatch.setenv("SECRET_KEY", "1")
    with pytest.raises(ConfigError) as error:
        Renderer(ChatTemplate("t.jinja", "ok", {}, []))
    text = str(error.value)
    found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert {found["file"], found["socket"]} == {"Too many open files"} and "SECRET_KEY" not in found["env"]


def test_a_template_that_does_not_compile_is_a_configuration_error():
    with pytest.raises(ConfigError, match="the chat template of t.jinja cannot be used: TemplateSyntaxError"):
        Renderer(ChatTemplate("t.jinja", "{% if %}", {}, []))
