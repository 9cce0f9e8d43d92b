"""Tool calls of every family, read from text in any pieces: the same calls, arguments that are JSON, nothing lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.flag_table import FLAG_BY_NAME
from headrace.text.tool_formats import FORMATS, ToolFormat, detected
from headrace.text.tool_parser import MAX_BROKEN_CALLS, Call, Part, ToolParser

NAMES = ("f", "get_weather", "edit-file")
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "on": {"type": "boolean"},
        "list": {"type": "array"},
        "s": {"type": "string"},
    },
}
KEYS = ("a", "city", "it's")


def parse(format: str, pieces: Sequence[str], names: Sequence[str] = NAMES) -> list[Part]:
    """What was found, text next to text joined."""
    parser = ToolParser(FORMATS[format], dict.fromkeys(names, SCHEMA))
    found: list[Part] = []
    for part in [part for piece in pieces for part in parser.add(piece)] + parser.finish():
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


def cuts(text: str, places: Sequence[int]) -> Iterator[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return (text[start:end] for start, end in itertools.pairwise(edges))


def calls_in(found: Sequence[Part]) -> list[tuple[str, object]]:
    return [(part.name, json.loads(part.arguments)) for part in found if isinstance(part, Call)]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=6), json_values, max_size=3)
calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3)
places = st.lists(st.integers(0, 4000), max_size=30)


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)
@settings(max_examples=15, deadline=None)
@given(calls=calls, places=places, ascii=st.booleans(), before=st.sampled_from(["", "Let me see.", "A [1] {x} <b>"]))
def test_calls_written_as_the_family_does_are_read_back_from_any_pieces(
    format: ToolFormat, calls: list[tuple[str, object]], places: list[int], ascii: bool, before: str
) -> None:
    before = "" if format.bare else before
    text = format.written([(name, json.dumps(value, ensure_ascii=ascii)) for name, value in calls])
    found = parse(format.name, list(cuts(before + text, places)))
    assert calls_in(found) == calls
    assert [part for part in found if isinstance(part, str)] == ([before] if before else [])


PIECES = sorted(
    {mark for format in FORMATS.values() for mark in format.marks}
    | {
        '{"name": "f", "arguments": {"a": 1}}',
        '{"name": "f", "parameters": {}}',
        '{"name": "x"}',
        "[f(a=1)]",
        "f(a='b')",
    }
    | {'{"name"', '"arguments": ', "{", "}", "[", "]", "(", '"', "'", "\\", "f", ",", ";", " ", "\n", "```", "a", "{}"}
    | {
        "<tool",
        "_call>",
        "[TOOL",
        "<｜tool▁ca",
        "]]",
        '{"a": "}"}',
        "1e999",
        "f[ARGS]{}",
        "functools[",
        "é",
        "<function=f>",
        "</function>",
        "<parameter=n>",
        "\ud83d\ude00",
    }
)


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=50, deadline=None)
@given(text=st.lists(st.sampled_from(PIECES), max_size=14).map("".join), places=places)
def test_the_result_does_not_depend_on_how_the_text_was_cut(format: str, text: str, places: list[int]) -> None:
    whole = parse(format, [text])
    assert parse(format, list(cuts(text, places))) == whole
    assert parse(format, list(text)) == whole
    for part in whole:
        if isinstance(part, Call):
            assert isinstance(json.loads(part.arguments), dict)
    if not calls_in(whole):
        assert "".join(part for part in whole if isinstance(part, str)) == text


GOOD = {
    "no arguments": ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", {})]),
    "null arguments": ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", {})]),
    "empty text for arguments": ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', [("f", {})]),
    "arguments as text": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        [("f", {"a": 1})],
    ),
    "arguments first": ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", {"a": 1})]),
    "no end mark": ("hermes", '<tool_call>{"name": "f", "arguments": {}}', [("f", {})]),
    "a list in one mark": (
        "hermes",
        '<tool_call>[{"name": "f"}, {"name": "edit-file"}]</tool_call>',
        [("f", {}), ("edit-file", {})],
    ),
    "the mark inside an argument": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
        [("f", {"a": "</tool_call>"})],
    ),
    "a raw line break in a string": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>',
        [("f", {"a": "x\ny"})],
    ),
    "half a surrogate pair": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>',
        [("f", {"a": "\ud83d"})],
    ),
    "a tool nobody has": ("hermes", '<tool_call>{"name": "unknown"}</tool_call>', [("unknown", {})]),
    "wrapped as in the request": (
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {}}}</tool_call>',
        [("f", {})],
    ),
    "a broken one before it": ("hermes", '<tool_call>{oops<tool_call>{"name": "f"}</tool_call>', [("f", {})]),
    "qwen's tags": (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n<parameter=s>\n4\nfive\n</parameter>\n"
        "<parameter=on>true</parameter>\n<parameter=list>[1]</parameter>\n</function>\n</tool_call>",
        [("f", {"n": 3, "s": "4\nfive", "on": True, "list": [1]})],
    ),
    "qwen's tags, badly typed": (
        "qwen3_coder",
        "<tool_call><function=f><parameter=n>many</parameter><parameter=x>7</parameter></function></tool_call>",
        [("f", {"n": "many", "x": "7"})],
    ),
    "qwen's tags without parameters": (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        [("f", {})],
    ),
    "qwen's JSON": ("qwen3_coder", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', [("f", {})]),
    "llama with its tag": ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})]),
    "llama, one a line": (
        "llama3_json",
        '{"name": "f", "parameters": {}}\n{"name": "f", "parameters": {"a": 2}}',
        [("f", {}), ("f", {"a": 2})],
    ),
    "llama with a type": ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}', [("f", {})]),
    "mistral with ids": (
        "mistral",
        '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{}',
        [("f", {"a": 1}), ("f", {})],
    ),
    "mistral, name and arguments only": ("mistral", '[TOOL_CALLS]f{"a": 1}', [("f", {"a": 1})]),
    "mistral's list with ids": (
        "mistral_args",
        '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abcdefghi"}]',
        [("f", {})],
    ),
    "phi's older word": ("phi4_mini", 'functools[{"name": "f", "arguments": {"a": 1}}]', [("f", {"a": 1})]),
    "gemma's code block": ("gemma", "```tool_code\nprint(f(a='x'))\n```", [("f", {"a": "x"})]),
    "gemma's JSON block": ("gemma", '```json\n{"name": "f", "parameters": {"a": 1}}\n```', [("f", {"a": 1})]),
    "gemma's list": ("gemma", "[f(a=1), f()]", [("f", {"a": 1}), ("f", {})]),
    "granite's object": ("granite", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', [("f", {})]),
    "granite of old": ("granite", '<function_call> {"name": "f", "arguments": {"a": 1}}', [("f", {"a": 1})]),
    "python's literals": (
        "pythonic",
        "[f(a=[1, -2.5, {'k': None}], city=\"it's\", x=True, y=false)]",
        [("f", {"a": [1, -2.5, {"k": None}], "city": "it's", "x": True, "y": False})],
    ),
    "llama 4's marks": ("pythonic", "<|python_start|>[f(a=1)]<|python_end|>", [("f", {"a": 1})]),
    "deepseek without its fence": (
        "deepseek_v3",
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>',
        [("f", {"a": 1})],
    ),
    "deepseek with one": (
        "deepseek_v31",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>",
        [("f", {})],
    ),
}


@pytest.mark.parametrize(("format", "text", "expected"), GOOD.values(), ids=GOOD)
def test_how_models_really_write_calls(format: str, text: str, expected: list[tuple[str, object]]) -> None:
    assert calls_in(parse(format, list(text))) == expected
    if "broken" not in text and "oops" not in text:
        assert not any(isinstance(part, str) for part in parse(format, [text]))


NO_CALLS = {
    "cut in the arguments": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "rm -rf /ho'),
    "tags without an end": ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=n>\n3"),
    "tags without a name": ("qwen3_coder", "<tool_call><function=></function>"),
    "other tags": ("qwen3_coder", "<tool_call><func>"),
    "not JSON": ("hermes", "<tool_call>{name: f}</tool_call>"),
    "a missing brace": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>'),
    "no name": ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    "arguments that are a list": ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    "a number that JSON lacks": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    "a number too large": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>'),
    "one bad call in a list": ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"arguments": {}}]'),
    "an empty list": ("mistral", "[TOOL_CALLS][]"),
    "JSON that is the answer": ("llama3_json", '{"name": "Alice", "parameters": {"age": 3}}'),
    "JSON with other keys": ("llama3_json", '{"answer": 42}'),
    "a citation": ("pythonic", "[1] says so."),
    "code that must be computed": ("pythonic", "[f(a=1 + 1)]"),
    "code with positions": ("pythonic", "[f(1)]"),
    "code without end": ("pythonic", "[f(a='x"),
    "nested beyond sense": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 20_000 + "]" * 20_000 + "}}",
    ),
    "deepseek's marks alone": ("deepseek_v3", "<｜tool▁calls▁begin｜> and <｜tool▁call▁begin｜>"),
}


@pytest.mark.parametrize(("format", "text"), NO_CALLS.values(), ids=NO_CALLS)
def test_what_is_no_valid_call_stays_text(format: str, text: str) -> None:
    assert parse(format, [text]) == [text]
    if len(text) < 1000:
        assert parse(format, list(text)) == [text]


def test_text_before_between_and_after_calls_is_kept() -> None:
    text = 'One.\n<tool_call>{"name": "f"}</tool_call>\n\nTwo.\n<tool_call>{"name": "f"}</tool_call>\n'
    assert parse("hermes", list(text)) == ["One.", Call("f", "{}"), "\n\nTwo.", Call("f", "{}")]


def test_plain_text_goes_out_as_it_comes() -> None:
    parser = ToolParser(FORMATS["hermes"], NAMES)
    assert [parser.add(piece) for piece in ("Hel", "lo ", "you <", "b>, ", "bye")] == [
        ["Hel"], ["lo"], [" you"], [" <b>,"], [" bye"]
    ]  # fmt: skip


def test_an_answer_full_of_marks_is_read_once() -> None:
    text = '<tool_call>{"name": ' * 5000
    assert parse("hermes", [text]) == [text]
    assert MAX_BROKEN_CALLS < 5000


TEMPLATES = {
    "hermes": "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}... within <tool_call></tool_call> XML tags",
    "qwen3_coder": "{% if tools %}<tool_call>\n<function=example>\n<parameter=a>\nvalue\n</parameter>{% endif %}",
    "llama3_json": '{{ "Environment: ipython\\n" }}{% if tools is not none %}...{% endif %}<|python_tag|>',
    "mistral": "[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS]{{ '[TOOL_CALLS][' }}",
    "mistral_args": "{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "phi4_mini": "{{ '<|' + message['role'] + '|>' + '<|tool|>' + message['tools'] + '<|/tool|>' }}",
    "deepseek_v3": "<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n' + '```json'",
    "deepseek_v31": "<｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>'",
    "granite": "<|start_of_role|>available_tools<|end_of_role|>{{ tools | tojson }}<|tool_call|>",
    "pythonic": "<|python_start|>{{ calls }}<|python_end|>",
}


@pytest.mark.parametrize(("name", "template"), TEMPLATES.items())
def test_the_format_is_read_from_the_chat_template(name: str, template: str) -> None:
    found = detected(template)
    assert found is not None and found.name == name


def test_a_template_without_marks_says_nothing_and_other_shapes_are_not_mistaken() -> None:
    assert detected("{% for message in messages %}{{ message.content }}{% endfor %}") is None
    assert detected("<tool_call>{{ name }}<arg_key>a</arg_key>") is None


def test_the_flag_knows_every_format() -> None:
    assert FLAG_BY_NAME["tool-call-parser"].choices == ("auto", *FORMATS)
