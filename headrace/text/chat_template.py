"""From messages to the prompt text, by the model's own Jinja template.

The environment is the one templates are written for (Hugging Face's: block trimming, loop controls,
raise_exception, strftime_now, a tojson that escapes no HTML, {% generation %} marks that render as their body),
sandboxed, because a template comes with a download or in a request.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]

# Put after the last message's text to find it again. Its space is gone where the template trims its messages.
_CUT_MARK = "HEADRACE-CONTINUES-HERE "
_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message")


class _GenerationBlocks(Extension):
    """{% generation %}...{% endgeneration %} marks the model's own words for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. Rendering has no side effects and may run in several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are the names a template may use: bos_token, eos_token, ...

        Raises ValueError with the line for a template that does not parse.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self.variables: frozenset[str]
        """What the template wants to be given."""
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template does not parse: {error.message} (line {error.lineno})") from error
        except (RecursionError, jinja2.TemplateError) as error:
            raise ValueError(f"the chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. `messages` are not changed; `kwargs` are further names for the template.

        Content given as a list of parts is joined with line breaks. `continue_final_message` ends the text
        inside the last message, so that the model goes on with it. Raises ValueError with the template's own
        words when it refuses the messages, and for parts that are not text.
        """
        if not messages:
            raise ValueError("messages is empty")
        reserved = [name for name in _RESERVED if name in kwargs]
        if reserved:
            raise ValueError(f"chat_template_kwargs may not set {', '.join(reserved)}")
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt cannot both be true")
        plain = [_plain(message, index) for index, message in enumerate(messages)]
        if continue_final_message:
            if not isinstance(plain[-1].get("content"), str):
                raise ValueError("continue_final_message is true, but the last message has no text to continue")
            final: str = plain[-1]["content"]
            plain[-1]["content"] = final + _CUT_MARK
        names = {**self._special_tokens, **kwargs}
        try:
            rendered = self._template.render(
                messages=plain,
                tools=copy.deepcopy(list(tools)) if tools is not None else None,
                add_generation_prompt=add_generation_prompt,
                **names,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refused the messages: {error.message or error}") from error
        except Exception as error:
            raise ValueError(f"the chat template failed: {type(error).__name__}: {error}") from error
        return _cut(rendered) if continue_final_message else rendered


def _plain(message: Message, index: int) -> dict[str, Any]:
    """A copy of a message whose content is a string (or None beside tool calls)."""
    copied: dict[str, Any] = copy.deepcopy(dict(message))
    content = copied.get("content")
    if isinstance(content, list):
        copied["content"] = "\n".join(_part_text(part, index) for part in content)
    elif content is None and not copied.get("tool_calls"):
        copied["content"] = ""
    return copied


def _part_text(part: object, index: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(kind) if isinstance(part, Mapping) and kind in ("text", "refusal") else None
    if not isinstance(text, str):
        named = f"of type {kind!r}" if isinstance(kind, str) else f"{type(part).__name__} without a type"
        raise ValueError(f"messages[{index}].content has a part {named}, but this model takes text parts only")
    return text


def _cut(rendered: str) -> str:
    """The text up to the mark; a template that trimmed the mark's space has trimmed the message's end too."""
    position = rendered.rfind(_CUT_MARK.rstrip())
    if position < 0:
        raise ValueError("continue_final_message is true, but the chat template leaves out the last message's text")
    trimmed = not rendered.startswith(_CUT_MARK, position)
    return rendered[:position].rstrip() if trimmed else rendered[:position]


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
