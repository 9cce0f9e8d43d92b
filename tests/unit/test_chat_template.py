"""Templates render as transformers renders them, cannot reach outside, and fail in words a person can use."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from headrace.config.model_files import open_model
from headrace.text.chat_template import ChatTemplate
from tests.small_models import bundled_gguf

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATION = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "  Hi there \n"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "你好 {{ not_a_template }} {% raw %}"},
]
# Shapes of real templates: Llama 2, Llama 3 and Qwen2.5 use these constructs.
TEMPLATES = {
    "bundled": open_model(bundled_gguf()).chat_template or "",
    "loops and trims": """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {{- '[' + message['role'] + '] ' + message['content'] | trim + eos_token }}
    {% if loop.last and add_generation_prompt %}
        {{ '[assistant]' }}
    {% endif %}
{%- endfor %}""",
    "namespace and json": """{% set ns = namespace(found=false) %}
{% for message in messages %}{% if message.role == "user" %}{% set ns.found = true %}{% endif %}
{{ message | tojson }}{{ {"a": [1, "ü<&"]} | tojson(indent=2) }}
{% endfor %}{{ ns.found }} {{ tools is none }} {{ undefined_name is defined }}""",
    "generation marks": """{% for message in messages %}{% if message.role == 'assistant' %}
{% generation %}
{{ message.content }}{{ eos_token }}
{% endgeneration %}
{% else %}{{ message.content }}{% endif %}{% endfor %}""",
}


@pytest.fixture(scope="module")
def oracle() -> Any:
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_rendering_equals_transformers(oracle: Any, name: str, prompt: bool) -> None:
    rendered, _ = oracle([CONVERSATION], chat_template=TEMPLATES[name], add_generation_prompt=prompt, **SPECIAL)
    assert ChatTemplate(TEMPLATES[name], SPECIAL).render(CONVERSATION, add_generation_prompt=prompt) == rendered[0]


@pytest.mark.parametrize("name", ["bundled", "loops and trims"])
@pytest.mark.parametrize("last", ["The answer", "The answer is ", "The answer is\n"])
def test_continuing_the_last_message_equals_transformers(oracle: Any, name: str, last: str) -> None:
    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": last}]
    rendered, _ = oracle([messages], chat_template=TEMPLATES[name], continue_final_message=True, **SPECIAL)
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    assert template.render(messages, add_generation_prompt=False, continue_final_message=True) == rendered[0]


def test_the_bundled_template_adds_its_system_message() -> None:
    rendered = ChatTemplate(TEMPLATES["bundled"], SPECIAL).render([{"role": "user", "content": "Hi"}])
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_text_parts_are_joined_and_others_are_refused_by_type() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert template.render([{"role": "user", "content": parts}]) == "one\ntwo"
    picture = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(ValueError, match=r"messages\[0\]\.content has a part of type 'image_url'"):
        template.render([{"role": "user", "content": [*parts, picture]}])
    with pytest.raises(ValueError, match="dict without a type"):
        template.render([{"role": "user", "content": [{"text": "x"}]}])


def test_rendering_changes_nothing_of_the_caller_s() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}], "extra": {"list": [1]}}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    before = copy.deepcopy((messages, tools))
    ChatTemplate("{{ messages }}{{ tools }}", {}).render(messages, tools=tools)
    assert (messages, tools) == before


def test_further_names_reach_the_template_but_not_the_reserved_ones() -> None:
    template = ChatTemplate("{{ enable_thinking }}{{ bos_token }}", SPECIAL)
    message = [{"role": "user", "content": "x"}]
    assert template.render(message, enable_thinking=False) == "False<s>"
    with pytest.raises(ValueError, match="may not set messages"):
        template.render(message, messages=[])


def test_a_template_s_own_refusal_is_passed_on() -> None:
    template = ChatTemplate("{{ raise_exception('Roles must alternate user/assistant') }}", {})
    with pytest.raises(ValueError, match="refused the messages: Roles must alternate user/assistant"):
        template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{% for m in messages %}", r"does not parse: .*endfor.* \(line 1\)"),
        ("{{ messages | nosuchfilter }}", "nosuchfilter"),
        ("a\n{% endif %}", r"\(line 2\)"),
    ],
)
def test_a_template_that_does_not_parse_says_where(source: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ undefined.attribute.deeper }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}{{ raise_exception('reached') }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_a_value_error(source: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(ValueError, match="the chat template"):
        template.render([{"role": "user", "content": "x"}])


def test_nothing_leaks_through_format_strings() -> None:
    template = ChatTemplate("{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", {})
    try:
        rendered = template.render([{"role": "user", "content": "x"}])
    except ValueError:
        return
    assert "module" not in rendered and "builtins" not in rendered


def test_the_date_is_at_hand() -> None:
    rendered = ChatTemplate("{{ strftime_now('%Y') }}", {}).render([{"role": "user", "content": "x"}])
    assert rendered.isdecimal() and len(rendered) == 4


def test_content_that_is_absent_is_empty_unless_tools_are_called() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}", {})
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert template.render([{"role": "assistant", "content": None}, calls]) == "[][None]"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"continue_final_message": True}, "cannot both be true"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "no text to continue"),
    ],
)
def test_a_continuation_that_makes_no_sense_is_refused(options: dict[str, Any], complaint: str) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    with pytest.raises(ValueError, match=complaint):
        ChatTemplate("x", {}).render([message], **options)


def test_a_template_that_drops_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(ValueError, match="leaves out the last message"):
        ChatTemplate("x", {}).render(
            [{"role": "user", "content": "y"}], add_generation_prompt=False, continue_final_message=True
        )


def test_no_messages_are_refused() -> None:
    with pytest.raises(ValueError, match="messages is empty"):
        ChatTemplate("x", {}).render([])
