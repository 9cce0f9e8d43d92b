"""How each family of models writes tool calls: marks and shapes as data, and which of them a chat template means.

    hermes    <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]
    deepseek  <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>
    pythonic  [f(a=1)]

`ToolParser` (tool_parser.py) reads every format with the same code; a new family is a new row of `FORMATS`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

NAME, ARGUMENTS = "%NAME%", "%ARGUMENTS%"
"""Where a call's name and its arguments (a JSON object) stand in `ToolFormat.call`."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One family's way to write calls.

    Reading: a call, or a list of calls, comes after one of `opens`; with `bare` also where an answer begins. After it
    each of `closes` may stand once. `around` are marks of the family that hold no call by themselves. Besides JSON
    `python` takes `[f(a=1)]`, and `tagged` takes `<function=f><parameter=a>1</parameter></function>`. `head` matches
    what stands before the arguments where the name is not inside the JSON; its group 1 is the name. `separators` may
    stand between calls instead of the marks.

    Writing: an answer of calls is `begin`, each call as `call` says with `join` between them, and `end`.
    """

    name: str
    call: str
    begin: str = ""
    join: str = ""
    end: str = ""
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    separators: str = ""
    bare: bool = False
    python: bool = False
    tagged: bool = False
    head: re.Pattern[str] | None = None
    id_chars: int = 24
    """Letters and digits after the prefix of a call's id."""
    id_prefix: str = "call_"

    def written(self, calls: list[tuple[str, str]]) -> str:
        """The calls, each a name and its arguments as JSON text, as a model of this family writes them."""
        return self.begin + self.join.join(self.one(name, arguments) for name, arguments in calls) + self.end

    def one(self, name: str, arguments: str) -> str:
        before, between, after = self.parts
        return f"{before}{name}{between}{arguments}{after}"

    @property
    def parts(self) -> tuple[str, str, str]:
        """What stands before a call's name, between name and arguments, and after them."""
        before, rest = self.call.split(NAME)
        between, after = rest.split(ARGUMENTS)
        return before, between, after

    @property
    def marks(self) -> tuple[str, ...]:
        """Every mark; those that are tokens of their own must reach the parser as text."""
        inner = tuple(re.findall(r"\[[A-Z_]+\]|<｜[^｜]+｜>", self.call))
        return tuple(dict.fromkeys((*self.opens, *self.closes, *self.around, *inner)))


_CALL = f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}'
_CALL_WITH_PARAMETERS = f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}'

_DEEPSEEK_V3 = ToolFormat(
    "deepseek_v3",
    begin="<｜tool▁calls▁begin｜>",
    call=f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>",
    join="\n",
    end="<｜tool▁calls▁end｜>",
    opens=("<｜tool▁call▁begin｜>",),
    closes=("```", "<｜tool▁call▁end｜>"),
    around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    head=re.compile(r"\s*(?:function<｜tool▁sep｜>)?([\w.-]+)(?:<｜tool▁sep｜>)?\s*(?:```(?:json)?)?\s*"),
)

_ROWS = (
    ToolFormat(
        "hermes",
        call=f"<tool_call>\n{_CALL}\n</tool_call>",
        join="\n",
        opens=("<tool_call>",),
        closes=("</tool_call>",),
    ),
    ToolFormat(
        "qwen3_coder",
        call=f"<tool_call>\n{_CALL}\n</tool_call>",
        join="\n",
        opens=("<tool_call>", "<seed:tool_call>"),
        closes=("</tool_call>", "</seed:tool_call>"),
        tagged=True,
    ),
    ToolFormat(
        "llama3_json",
        call=_CALL_WITH_PARAMETERS,
        join="; ",
        opens=("<|python_tag|>",),
        separators=";,",
        bare=True,
    ),
    ToolFormat(
        "mistral",
        begin="[TOOL_CALLS][",
        call=_CALL,
        join=", ",
        end="]",
        opens=("[TOOL_CALLS]",),
        head=re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?\s*"),
        id_prefix="",
        id_chars=9,
    ),
    ToolFormat(
        "mistral_args",
        call=f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}",
        opens=("[TOOL_CALLS]",),
        around=("[CALL_ID]",),
        head=re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?\s*"),
        id_prefix="",
        id_chars=9,
    ),
    ToolFormat(
        "phi4_mini",
        begin="<|tool_call|>[",
        call=_CALL,
        join=", ",
        end="]<|/tool_call|>",
        opens=("<|tool_call|>", "functools"),
        closes=("<|/tool_call|>",),
    ),
    ToolFormat(
        "gemma",
        call=_CALL_WITH_PARAMETERS,
        join="; ",
        opens=("```tool_code", "```json"),
        closes=("```",),
        separators=";,",
        bare=True,
        python=True,
    ),
    _DEEPSEEK_V3,
    replace(
        _DEEPSEEK_V3,
        name="deepseek_v31",
        call=f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>",
        join="",
    ),
    ToolFormat(
        "granite",
        begin="<|tool_call|>[",
        call=_CALL,
        join=", ",
        end="]",
        opens=("<|tool_call|>", "<tool_call>", "<function_call>"),
        closes=("</tool_call>", "</function_call>"),
    ),
    ToolFormat(
        "pythonic",
        call=_CALL_WITH_PARAMETERS,
        join="; ",
        opens=("<|python_start|>", "<|tool_call_start|>"),
        closes=("<|python_end|>", "<|tool_call_end|>"),
        separators=";,",
        bare=True,
        python=True,
    ),
)

FORMATS: Mapping[str, ToolFormat] = {row.name: row for row in _ROWS}


@dataclass(frozen=True, slots=True)
class _Sign:
    """A format is meant by a template that holds one of `any` and all of `all`."""

    format: str
    any: tuple[str, ...]
    all: tuple[str, ...] = field(default=())


_SIGNS = (
    _Sign("qwen3_coder", ("<function=",), ("<parameter=",)),
    _Sign("deepseek_v3", ("<｜tool▁call▁begin｜>",), ("```json",)),
    _Sign("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    _Sign("mistral_args", ("[TOOL_CALLS]",), ("[ARGS]",)),
    _Sign("mistral", ("[TOOL_CALLS]",)),
    _Sign("phi4_mini", ("<|/tool|>", "<|/tool_call|>", "functools[")),
    _Sign("granite", ("<|tool_call|>", "<function_call>")),
    _Sign("granite", ("<|start_of_role|>",), ("tools",)),
    _Sign("pythonic", ("<|python_start|>", "<|tool_call_start|>", "[func_name1(")),
    _Sign("hermes", ("<tool_call>",)),
    _Sign("llama3_json", ("<|python_tag|>", '"parameters": dictionary of argument name', "Environment: ipython")),
    _Sign("gemma", ("tool_code",)),
)
_OTHER_SHAPES = ("<arg_key>", "<|channel|>")
"""In templates of families whose calls have shapes that are not known here, whatever marks are around them."""


def detected(template: str) -> ToolFormat | None:
    """The format that a model with this chat template was taught; None where nothing in it tells."""
    if any(shape in template for shape in _OTHER_SHAPES):
        return None
    for sign in _SIGNS:
        if any(mark in template for mark in sign.any) and all(mark in template for mark in sign.all):
            return FORMATS[sign.format]
    return None
