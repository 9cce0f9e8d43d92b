"""How the served model's conversations are written and read: its templates, its way to call tools, its thinking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.config.settings import ServerSettings
from headrace.protocol import errors
from headrace.protocol.ipc import ThinkingBudget
from headrace.protocol.openai_chat import ChatFields, template_variables
from headrace.protocol.tools import ToolRequest
from headrace.server.http import Exchange
from headrace.text import reasoning, tool_formats
from headrace.text.answer_parser import Reading
from headrace.text.chat_template import ChatTemplate
from headrace.text.reasoning import ReasoningFormat
from headrace.text.tokenizer import Tokenizer
from headrace.text.tool_formats import ToolFormat
from headrace.text.tool_prompt import knows_tools

FALLBACK = tool_formats.FORMATS["hermes"]
"""Told to a model whose template knows nothing of tools."""


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True)
class ChatFormat:
    """`tool_template` is the model's template for requests with tools, where it has one of its own.

    `calls` None: the template shows tools, and nothing says how the model calls them. `opening_ids` and `closing_ids`
    are the tokens of the marks of thinking.
    """

    template: ChatTemplate
    tool_template: ChatTemplate | None
    calls: ToolFormat | None
    reasoning: ReasoningFormat | None
    opening_ids: tuple[int, ...] = ()
    closing_ids: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        template: ChatTemplate,
        tool_template: ChatTemplate | None,
        settings: ServerSettings,
        tokenizer: Tokenizer,
    ) -> ChatFormat:
        """The formats that flags name, else those that the templates are written for."""
        shown_by = tool_template or template
        calls = tool_formats.FORMATS.get(settings.tool_call_parser) or tool_formats.detected(shown_by.source)
        if calls is None and not knows_tools(shown_by):
            calls = FALLBACK
        thinking = _reasoning(settings.reasoning_parser, template)
        opening: tuple[int, ...] = ()
        closing: tuple[int, ...] = ()
        if thinking is not None:
            opening, closing = (
                tuple(tokenizer.encode(mark, add_special_tokens=False)) for mark in (thinking.opens, thinking.closes)
            )
        return cls(template, tool_template, calls, thinking, opening, closing)

    def warnings(self) -> Sequence[str]:
        """What whoever starts the server should know."""
        if self.calls is not None:
            return ()
        return (
            "The chat template shows tools, but how the model calls them is not known: requests with tools get a 400 "
            "unless a call is required. Name it with --tool-call-parser.",
        )

    @property
    def writes_calls(self) -> ToolFormat:
        """How calls are put into words for a template that knows nothing of them."""
        return self.calls or FALLBACK

    def template_for(self, tools: ToolRequest) -> ChatTemplate:
        return self.tool_template if tools.shown and self.tool_template is not None else self.template

    def variables(self, fields: ChatFields, exchange: Exchange) -> dict[str, Any]:
        """What the template is given besides messages and tools. Wishes that it does not know are named as ignored."""
        variables = template_variables(fields.chat_template_kwargs)
        known = self.template.variables
        exchange.warn_ignored([f"chat_template_kwargs.{name}" for name in variables if name not in known])
        effort = fields.reasoning_effort
        if fields.enable_thinking is not None:
            variables.setdefault("enable_thinking", fields.enable_thinking)
            if "enable_thinking" not in known:
                exchange.warn_ignored(["enable_thinking"])
        if effort is not None and not self._put_effort(effort, variables):
            exchange.warn_ignored(["reasoning_effort"])
        return variables

    def _put_effort(self, effort: str, variables: dict[str, Any]) -> bool:
        """Whether the template is told all that it says; where it knows only whether to think, it is told that.
        Raises ApiError (400) for an effort that has no meaning."""
        if effort not in EFFORTS:
            guess = errors.nearest(effort, EFFORTS)
            hint = f" Did you mean `{guess}`?" if guess else ""
            message = f"`reasoning_effort` is {errors.quoted(effort)}; use {', '.join(EFFORTS)}.{hint}"
            raise errors.invalid_value("reasoning_effort", message)
        known = self.template.variables
        if "reasoning_effort" in known:
            return bool(variables.setdefault("reasoning_effort", effort) == effort)
        if "enable_thinking" in known:
            return variables.setdefault("enable_thinking", effort != "none") is False and effort == "none"
        return effort == "none" and self.reasoning is None

    def reading(self, fields: ChatFields, tools: ToolRequest, *, is_thinking: bool) -> Reading:
        """Raises ApiError (400) for tools that the model could call, and nobody could read it."""
        if tools.tools and self.calls is None and not tools.is_forced:
            message = (
                "The model's chat template shows tools, but how the model calls them is not known. Start the server "
                "with --tool-call-parser NAME, or send `tool_choice` required."
            )
            raise errors.invalid_value("tools", message)
        return Reading(
            reasoning=None if fields.separate_reasoning is False else self.reasoning,
            is_thinking=is_thinking,
            tells_reasoning=fields.include_reasoning is not False,
            tools=self.writes_calls if tools.tools else None,
            schemas={tool.name: tool.parameters for tool in tools.tools},
            one_call=tools.mode == "named" or not tools.parallel,
        )

    def budget(self, tokens: int | None, *, is_thinking: bool) -> ThinkingBudget | None:
        """Raises ApiError (400) where the model does not think, or the budget is no number of tokens."""
        if tokens is None:
            return None
        if tokens < 0:
            raise errors.out_of_range("thinking_token_budget", tokens, "0 or more")
        if self.reasoning is None:
            message = "`thinking_token_budget` would have no effect: this model's answers have no thinking."
            raise errors.invalid_value("thinking_token_budget", message)
        return ThinkingBudget(tokens, self.closing_ids, () if is_thinking else self.opening_ids)


def _reasoning(flag: str, template: ChatTemplate) -> ReasoningFormat | None:
    if flag == "none":
        return None
    return reasoning.FORMATS.get(flag) or reasoning.detected(template.source)
