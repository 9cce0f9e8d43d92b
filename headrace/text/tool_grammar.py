"""Calls that must come, or be right if they come, as a grammar: in the family's writing, arguments by their schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.protocol.grammar_text import LarkRules, lark_grammar
from headrace.protocol.ipc import GrammarSpec
from headrace.protocol.tools import ToolRequest
from headrace.text.tool_formats import ToolFormat

_FIELD = "tools"


def tool_grammar(
    request: ToolRequest,
    format: ToolFormat,
    *,
    special_tokens: Mapping[str, int],
    answer: GrammarSpec | None = None,
    after: Sequence[int] = (),
) -> GrammarSpec | None:
    """What an answer must match that may have calls; None where the model may write what it likes.

    `answer` is what the request demands of an answer without calls; beside calls that may come it can be JSON only.
    `special_tokens` are the marks that are tokens; `after` as in `GrammarSpec.after_token_ids`. Raises ApiError (400).
    """
    as_json = answer is not None and answer.kind == "json_schema"
    if not request.is_forced and not as_json and (answer is not None or not any(tool.strict for tool in request.tools)):
        return answer
    before, between, rest = format.parts
    begin, end = format.begin + before, rest + format.end
    rules = LarkRules(_FIELD, special_tokens)
    calls = []
    for tool in request.tools:
        schema = tool.parameters if request.is_forced or tool.strict else {"type": "object"}
        calls.append((f"{begin}{tool.name}{between}", rules.join(rules.json(schema, tool.path), rules.literal(end))))
    one = request.mode == "named" or not request.parallel
    if request.is_forced or as_json:
        separator = "" if format.begin else format.join
        start = rules.separated(calls, separator, at_least_one=True, at_most_one=one)
        if answer is not None and not request.is_forced:
            start = rules.either([start, rules.rule(f"%json {answer.text}")])
    else:
        mark = format.opens[0] if format.opens and begin.startswith(format.opens[0]) else begin
        start = rules.triggered(calls, [mark], at_least_one=False, at_most_one=one)
    return lark_grammar(rules.grammar(start), _FIELD, after=after)
