"""Calls of earlier turns through chat templates of every family's kind, read back by the format the template shows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.protocol.openai_chat import plain_messages
from headrace.text.chat_template import ChatTemplate
from headrace.text.tool_formats import FORMATS, detected
from headrace.text.tool_parser import Call, ToolParser
from headrace.text.tool_prompt import knows_tools, prepared

TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "description": 'Says "é".', "parameters": {}}}]
ARGUMENTS = {"city": "Rómà", "days": 2, "quote": 'a "b"\n', "deep": {"x": [True, None]}}

EACH = "{% for m in messages %}{% if m.tool_calls %}"
END = "{% endif %}{% endfor %}{{ tools }}"
JSON = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
FOR = "{% for c in m.tool_calls %}"
# How the families' own templates write the calls of an assistant's message.
TEMPLATES = {
    "hermes": f"{EACH}{FOR}<tool_call>\n{JSON}\n</tool_call>\n{{% endfor %}}{END}",
    "llama3_json": f"{EACH}{FOR}"
    "{{ '{\"name\": \"' + c.function.name + '\", ' }}{{ '\"parameters\": ' }}{{ c.function.arguments | tojson }}}"
    f"{{% endfor %}}{END}{{# <|python_tag|> #}}",
    "mistral": f"{EACH}{{{{ '[TOOL_CALLS] [' }}}}{FOR}{{% set out = c.function | tojson %}}"
    "{{ out[:-1] + ', \"id\": \"' + c.id[-9:] + '\"}' }}{% if not loop.last %}, {% endif %}{% endfor %}]" + END,
    "mistral_args": f"{EACH}{FOR}"
    "{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + (c.function.arguments | tojson) }}{% endfor %}" + END,
    "phi4_mini": f"{EACH}{FOR}"
    "{{ '<|tool_call|>' + (c['function'] | tojson) + '<|/tool_call|>' }}{% endfor %}" + END,
    "deepseek_v3": f"{EACH}<｜tool▁calls▁begin｜>{FOR}"
    "{{ '<｜tool▁call▁begin｜>' + c['type'] + '<｜tool▁sep｜>' + c['function']['name'] + '\\n' + '```json' + '\\n' "
    "+ c['function']['arguments'] + '\\n' + '```' + '<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>" + END,
    "deepseek_v31": f"{EACH}<｜tool▁calls▁begin｜>{FOR}"
    "{{ '<｜tool▁call▁begin｜>' + c['function']['name'] + '<｜tool▁sep｜>' ~ c['function']['arguments'] "
    "~ '<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>" + END,
    "granite": f"{EACH}<|tool_call|>[{FOR}{JSON}{{% if not loop.last %}}, {{% endif %}}{{% endfor %}}]{END}",
    "pythonic": f"{EACH}<|tool_call_start|>[{FOR}{JSON}{{% if not loop.last %}}, {{% endif %}}{{% endfor %}}]"
    f"<|tool_call_end|>{END}",
    "qwen3_coder": f"{EACH}{FOR}<tool_call>\n<function={{{{ c.function.name }}}}>\n"
    "{% for key, value in c.function.arguments | items %}<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>\n"
    f"{{% endfor %}}{END}",
}
SCHEMA = {"properties": {"days": {"type": "integer"}, "deep": {"type": "object"}}}


def conversation() -> list[dict[str, object]]:
    def call(number: int) -> dict[str, object]:
        function = {"name": "f", "arguments": json.dumps(ARGUMENTS)}
        return {"id": f"call00000{number}", "type": "function", "function": function}

    calls: dict[str, object] = {"role": "assistant", "content": None, "tool_calls": [call(1), call(2)]}
    return [{"role": "user", "content": "Weather?"}, calls]


@pytest.mark.parametrize("family", TEMPLATES)
def test_what_a_familys_template_writes_is_what_its_parser_reads(family: str) -> None:
    template = ChatTemplate(TEMPLATES[family], {})
    format = detected(template.source)
    assert format is FORMATS[family]
    messages, tools = prepared(template, format, plain_messages(conversation(), knows_developer=False), [])
    parser = ToolParser(format, {"f": SCHEMA})
    rendered = template.render(messages, tools=tools).removesuffix("None")
    found = [part for character in rendered for part in parser.add(character)] + parser.finish()
    assert [part.name for part in found if isinstance(part, Call)] == ["f", "f"]
    for part in found:
        assert isinstance(part, Call), rendered
        assert json.loads(part.arguments) == ARGUMENTS


def test_every_format_but_those_that_are_bare_python_has_a_template_here() -> None:
    assert set(FORMATS) - set(TEMPLATES) == {"gemma"}


def told(source: str, tools: list[Any]) -> tuple[list[dict[str, Any]], Any]:
    plain = plain_messages([{"role": "system", "content": "Be brief."}, *conversation()], knows_developer=False)
    return prepared(ChatTemplate(source, {}), FORMATS["hermes"], plain, tools)


def test_a_template_that_takes_tools_gets_them_as_they_are() -> None:
    messages, tools = told("{{ tools }}{{ messages[0].tool_calls }}", TOOLS)
    assert (tools, messages[0]["content"]) == (TOOLS, "Be brief.")
    assert told("{{ tools }}", [])[1] is None


def test_a_template_that_reads_tools_from_the_system_message_gets_them_there() -> None:
    source = "{% for message in messages %}{{ message['tools'] }}{{ message.tool_calls }}{% endfor %}"
    messages, tools = told(source, TOOLS)
    assert tools is None and json.loads(messages[0]["tools"]) == [TOOLS[0]["function"]]
    assert messages[0]["content"] == "Be brief." and knows_tools(ChatTemplate(source, {}))


def test_a_template_that_knows_calls_and_no_tools_is_told_of_the_tools_only() -> None:
    messages, tools = told("{% for m in messages %}{{ m.tool_calls }}{% endfor %}", TOOLS)
    assert tools is None and messages[0]["content"].startswith("Be brief.\n\nYou can call tools.")
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS


def test_a_template_that_knows_neither_gets_all_of_it_in_words() -> None:
    messages, tools = told("{% for m in messages %}{{ m.content }}{% endfor %}", TOOLS)
    assert tools is None and not knows_tools(ChatTemplate("{{ messages }}", {}))
    assert messages[2]["content"].startswith('<tool_call>\n{"name": "f", "arguments": {"city": "Rómà", ')
    assert "tool_calls" not in messages[2]


def test_arguments_that_are_no_object_are_shown_as_they_came() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{oops"}}
    plain = plain_messages([{"role": "assistant", "tool_calls": [call]}], knows_developer=False)
    messages, _ = prepared(ChatTemplate("{{ messages[0].tool_calls }}", {}), FORMATS["hermes"], plain, [])
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == "{oops"
    messages, _ = prepared(ChatTemplate("{{ messages[0].content }}", {}), FORMATS["hermes"], plain, [])
    assert messages[0]["content"] == '<tool_call>\n{"name": "f", "arguments": {oops}\n</tool_call>'
