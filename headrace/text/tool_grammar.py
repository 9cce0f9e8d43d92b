"""Calls that must come, or be right if they come, as a grammar: in the family's writing, arguments by their schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.protocol.grammar_text import Tag, tagged_grammar
from headrace.protocol.ipc import GrammarSpec
from headrace.protocol.tools import Tool, ToolRequest
from headrace.text.tool_formats import ToolFormat


def tool_grammar(
    request: ToolRequest, format: ToolFormat, *, special_tokens: Mapping[str, int], after: Sequence[int] = ()
) -> GrammarSpec | None:
    """None where the model may write what it likes: no call is demanded and no tool is strict.

    `special_tokens` are the marks that are tokens; `after` as in `GrammarSpec.after_token_ids`. Raises ApiError (400).
    """
    if not request.is_forced and not any(tool.strict for tool in request.tools):
        return None
    before, between, after_arguments = format.parts
    begin, end = format.begin + before, after_arguments + format.end
    checked = request.is_forced

    def schema(tool: Tool) -> object:
        return tool.parameters if checked or tool.strict else {"type": "object"}

    return tagged_grammar(
        [Tag(f"{begin}{tool.name}{between}", schema(tool), end) for tool in request.tools],
        triggers=[format.opens[0] if format.opens and begin.startswith(format.opens[0]) else begin],
        field="tools",
        at_least_one=request.is_forced,
        at_most_one=request.mode == "named" or not request.parallel,
        free_text=not request.is_forced,
        separator="" if format.begin else format.join,
        special_tokens=special_tokens,
        after=after,
    )
