"""Anthropic messages, the request: read into a Conversation, written from one.

What this dialect wants and the others do not: `max_tokens` always, the system prompt apart from the turns, tool
results at the head of the user's turn, arguments as objects, temperature up to 1, signed thinking or none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Literal

from headrace.protocol import errors
from headrace.protocol.translate import wire
from headrace.protocol.translate.chat_request import known_format
from headrace.protocol.translate.conversation import (
    Audio,
    Conversation,
    Document,
    Image,
    Part,
    Redacted,
    Report,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolOrigin,
    ToolResult,
    Turn,
    current_turn,
    media_of,
    merged,
    origins_of,
    tool_name,
)
from headrace.protocol.translate.signatures import signer_of
from headrace.protocol.translate.wire import Json

ThinkingStyle = Literal["budget", "effort"]
"""How an upstream is told to think: `thinking.budget_tokens`, or `output_config.effort` with adaptive thinking."""

_READ = frozenset(
    "model messages system max_tokens temperature top_p stop_sequences stream tools tool_choice thinking output_config "
    "metadata service_tier".split()
)
_PASSED_ON = frozenset(
    "top_k container context_management mcp_servers inference_geo speed cache_control service_tier diagnostics".split()
)
"""Fields the dialect knows and that mean nothing else elsewhere; any other field is refused by Anthropic."""

_BUDGETS = {"minimal": 1024, "low": 2048, "medium": 8192, "high": 16384, "xhigh": 24576, "max": 32768}
_LEAST_BUDGET = 1024


def read(body: Json) -> Conversation:
    """Raises ApiError (400) naming the field that is malformed or that no other dialect can express."""
    report = Report()
    if '"cache_control"' in wire.encode_text({name: body.get(name) for name in ("system", "messages", "tools")}):
        report.drop("cache_control")
    tools, origins = _read_tools(body, report)
    choice, parallel = _read_choice(body)
    thinking = wire.optional_mapping(body.get("thinking"), "thinking") or {}
    output = wire.optional_mapping(body.get("output_config"), "output_config") or {}
    metadata = wire.optional_mapping(body.get("metadata"), "metadata") or {}
    turns = [Turn("system", tuple(_read_blocks(body.get("system"), "system", report)))] if body.get("system") else []
    for path, message in wire.items(body.get("messages"), "messages"):
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            message_ = f"`{path}.role` is {errors.quoted(role)}; use user or assistant."
            raise errors.invalid_value(f"{path}.role", message_)
        turns.append(Turn(role, tuple(_read_blocks(message.get("content"), f"{path}.content", report))))
    if not body.get("messages"):
        raise errors.invalid_value("messages", "`messages` is missing or empty; send at least one message.")
    others = {name: value for name, value in body.items() if name not in _READ and value is not None}
    tier = body.get("service_tier")
    if tier not in (None, "auto"):
        report.drop("service_tier")
    format = wire.optional_mapping(output.get("format"), "output_config.format")
    return Conversation(
        turns=tuple(turns),
        tools=tools,
        begins_answer=_begins_answer(turns[-1]),
        tool_choice=choice,
        parallel_calls=parallel,
        max_tokens=wire.optional_int(body.get("max_tokens"), "max_tokens"),
        temperature=wire.optional_number(body.get("temperature"), "temperature"),
        top_p=wire.optional_number(body.get("top_p"), "top_p"),
        stop=wire.strings(body.get("stop_sequences"), "stop_sequences"),
        stream=bool(wire.optional_bool(body.get("stream"), "stream")),
        format=None if format is None else {"name": "answer", **known_format(format, "output_config.format")},
        effort=wire.optional_string(output.get("effort"), "output_config.effort"),
        thinking=_read_thinking(thinking),
        thinking_budget_tokens=wire.optional_int(thinking.get("budget_tokens"), "thinking.budget_tokens"),
        user=wire.optional_string(metadata.get("user_id"), "metadata.user_id"),
        others=others,
        dropped=report.names,
        origins=origins,
    )


def _begins_answer(last: Turn) -> bool:
    has_text = any(isinstance(part, Text) and part.text for part in last.parts)
    return last.role == "assistant" and has_text and not any(isinstance(part, ToolCall) for part in last.parts)


def _read_thinking(thinking: Json) -> Literal["on", "off", "adaptive"] | None:
    match thinking.get("type"):
        case "enabled":
            return "on"
        case "disabled":
            return "off"
        case "adaptive" | "between_tools":
            return "adaptive"
        case None:
            return None
        case other:
            raise errors.invalid_value(
                "thinking.type", f"`thinking.type` is {errors.quoted(other)}; use enabled, adaptive or disabled."
            )


def _read_blocks(content: object, path: str, report: Report) -> Iterable[Part]:
    if isinstance(content, str):
        if content:
            yield Text(content)
        return
    if not isinstance(content, list):
        raise errors.invalid_type(path, "a string or a list of blocks", wire.kind(content))
    for place, block in wire.items(content, path):
        part = _read_block(block, place, report)
        if part is not None:
            yield part


def _read_block(block: Json, path: str, report: Report) -> Part | None:
    match block.get("type"):
        case "text":
            return Text(wire.string(block.get("text"), f"{path}.text"))
        case "image":
            return _read_image(wire.mapping(block.get("source"), f"{path}.source"), path)
        case "document":
            return _read_document(block, path)
        case "search_result":
            found = [part.text for part in _read_blocks(block.get("content"), path, report) if isinstance(part, Text)]
            return Text("\n".join([str(block.get("title", "")), str(block.get("source", "")), *found]))
        case "thinking":
            signature = block.get("signature") or None
            signer, signature = signer_of(signature, "messages")
            return Thinking(wire.string(block.get("thinking"), f"{path}.thinking"), signature, signer)
        case "redacted_thinking":
            return Redacted(wire.string(block.get("data"), f"{path}.data"))
        case "tool_use":
            name = tool_name(wire.string(block.get("name"), f"{path}.name"))
            return ToolCall(wire.string(block.get("id"), f"{path}.id"), name, wire.arguments_text(block.get("input")))
        case "tool_result":
            call_id = wire.string(block.get("tool_use_id"), f"{path}.tool_use_id")
            inner = block.get("content")
            parts = () if inner is None else tuple(_read_blocks(inner, f"{path}.content", report))
            told = tuple(part for part in parts if isinstance(part, Text | Image | Document))
            return ToolResult(call_id, told, bool(block.get("is_error")))
        case str() as other if other == "server_tool_use" or other.endswith("_tool_result") or "tool_" in other:
            report.drop(f"messages.{other}")
            return None
        case other:
            raise wire.impossible(f"{path}.type", f"a block of type {errors.quoted(other)} has no translation.")


def _read_image(source: Json, path: str) -> Image:
    match source.get("type"):
        case "base64":
            media, data = (wire.string(source.get(name), f"{path}.source.{name}") for name in ("media_type", "data"))
            return Image(url=f"data:{media};base64,{data}")
        case "url":
            return Image(url=wire.string(source.get("url"), f"{path}.source.url"))
        case "file":
            return Image(file_id=wire.string(source.get("file_id"), f"{path}.source.file_id"))
        case other:
            raise errors.invalid_value(
                f"{path}.source.type", f"`{path}.source.type` is {errors.quoted(other)}; use base64, url or file."
            )


def _read_document(block: Json, path: str) -> Document:
    source = wire.mapping(block.get("source"), f"{path}.source")
    name = wire.optional_string(block.get("title"), f"{path}.title")
    match source.get("type"):
        case "base64":
            media, data = (wire.string(source.get(key), f"{path}.source.{key}") for key in ("media_type", "data"))
            return Document(url=f"data:{media};base64,{data}", name=name)
        case "text":
            return Document(text=wire.string(source.get("data"), f"{path}.source.data"), name=name)
        case "url":
            return Document(url=wire.string(source.get("url"), f"{path}.source.url"), name=name)
        case "file":
            return Document(file_id=wire.string(source.get("file_id"), f"{path}.source.file_id"), name=name)
        case other:
            raise wire.impossible(
                f"{path}.source.type", f"a document of type {errors.quoted(other)} has no translation."
            )


def _read_tools(body: Json, report: Report) -> tuple[tuple[Tool, ...], dict[str, ToolOrigin]]:
    tools: list[Tool] = []
    origins: list[ToolOrigin] = []
    for path, tool in wire.items(body.get("tools"), "tools"):
        shape = tool.get("type")
        if shape not in (None, "custom"):
            report.drop(f"tools.{shape}")
            continue
        origin = ToolOrigin(wire.string(tool.get("name"), f"{path}.name"))
        origins.append(origin)
        description = wire.optional_string(tool.get("description"), f"{path}.description")
        schema = wire.mapping(tool.get("input_schema"), f"{path}.input_schema")
        strict = wire.optional_bool(tool.get("strict"), f"{path}.strict")
        tools.append(Tool(tool_name(origin.name), description, schema, strict, path))
    return tuple(tools), origins_of(origins)


def _read_choice(body: Json) -> tuple[ToolChoice | None, bool | None]:
    choice = wire.optional_mapping(body.get("tool_choice"), "tool_choice")
    if choice is None:
        return None, None
    alone = wire.optional_bool(choice.get("disable_parallel_tool_use"), "tool_choice.disable_parallel_tool_use")
    parallel = None if alone is None else not alone
    match choice.get("type"):
        case "auto" | "none" as mode:
            return ToolChoice(mode), parallel
        case "any":
            return ToolChoice("required"), parallel
        case "tool":
            return ToolChoice("named", tool_name(wire.string(choice.get("name"), "tool_choice.name"))), parallel
        case other:
            raise errors.invalid_value(
                "tool_choice.type", f"`tool_choice.type` is {errors.quoted(other)}; use auto, any, tool or none."
            )


# writing


def write(
    conversation: Conversation,
    *,
    model: str,
    default_max_tokens: int,
    style: ThinkingStyle,
    takes_sampling: bool = True,
) -> tuple[Json, tuple[str, ...]]:
    """The body for an Anthropic upstream and the names of the fields that were left out. Raises ApiError (400)."""
    report = Report(conversation.dropped)
    system = [part for turn in conversation.turns if turn.role == "system" for part in turn.parts]
    turns = merged(turn for turn in conversation.turns if turn.role != "system")
    messages = [message for message in (_message(turn, report) for turn in turns) if message["content"]]
    if not messages:
        raise wire.impossible("messages", "an Anthropic upstream wants at least one message that is not a system one.")
    max_tokens = default_max_tokens if conversation.max_tokens is None else conversation.max_tokens
    body: Json = {"model": model, "max_tokens": max_tokens}
    if system:
        blocks = [
            {"type": "text", "text": part.text} for part in system if isinstance(part, Text) and part.text.strip()
        ]
        if blocks:
            body["system"] = blocks[0]["text"] if len(blocks) == 1 else blocks
    body["messages"] = messages
    body |= _sampling(conversation, takes_sampling, report)
    stop = [sequence for sequence in conversation.stop if sequence.strip()]
    if len(stop) < len(conversation.stop):
        report.drop("stop")
    if stop:
        body["stop_sequences"] = stop
    if conversation.tools:
        body["tools"] = [_tool(tool) for tool in conversation.tools]
        choice = _choice(conversation)
        if choice is not None:
            body["tool_choice"] = choice
    body |= _thinking(conversation, turns, max_tokens, style, report)
    if conversation.format is not None:
        if conversation.format["type"] == "json_schema":
            format = {"type": "json_schema", "schema": conversation.format.get("schema", {})}
            body["output_config"] = {**body.get("output_config", {}), "format": format}
        else:
            report.drop("response_format")
    thinks = body.get("thinking", {}).get("type", "disabled") != "disabled"
    if thinks and body.pop("temperature", 1) != 1:
        report.drop("temperature")
    if conversation.user is not None:
        body["metadata"] = {"user_id": conversation.user}
    others = dict(conversation.others)
    if not takes_sampling:
        report.drop_fields({"top_k": others.pop("top_k", None)})
    if others.get("service_tier") not in ("auto", "standard_only"):
        report.drop_fields({"service_tier": others.pop("service_tier", None)})
    body |= {name: value for name, value in others.items() if name in _PASSED_ON}
    report.drop_fields({name: value for name, value in others.items() if name not in _PASSED_ON})
    if conversation.stream:
        body["stream"] = True
    return body, report.names


def _sampling(conversation: Conversation, is_taken: bool, report: Report) -> Json:
    """Temperature goes up to 1 here; where sampling is the model's own affair, other wishes than 1 are reported."""
    wishes = {"temperature": conversation.temperature, "top_p": conversation.top_p}
    stated = {name: value for name, value in wishes.items() if value is not None}
    for name, value in stated.items():
        if value > 1 or (value != 1 and not is_taken):
            report.drop(name)
    return {name: min(value, 1) for name, value in stated.items()} if is_taken else {}


def _thinking(
    conversation: Conversation, turns: Sequence[Turn], max_tokens: int, style: ThinkingStyle, report: Report
) -> Json:
    effort = conversation.effort
    if effort is None:
        return {}
    if effort == "none":
        return {"thinking": {"type": "disabled"}}
    if style == "effort":
        known = {"minimal": "low"}.get(effort, effort)
        return {"thinking": {"type": "adaptive"}, "output_config": {"effort": known}}
    budget = min(_BUDGETS.get(effort, _BUDGETS["medium"]), max_tokens // 2)
    forced = conversation.tool_choice is not None and conversation.tool_choice.mode in ("required", "named")
    if budget < _LEAST_BUDGET or forced or _calls_without_signed_thinking(turns):
        report.drop("reasoning_effort")
        return {}
    return {"thinking": {"type": "enabled", "budget_tokens": budget}}


def _calls_without_signed_thinking(turns: Sequence[Turn]) -> bool:
    """With thinking on, a tool call in the present turn must come with the thinking that led to it."""
    return any(
        any(isinstance(part, ToolCall) for part in turn.parts) and not any(_is_signed(part) for part in turn.parts)
        for turn in turns[current_turn(turns) :]
        if turn.role == "assistant"
    )


def _is_signed(part: Part) -> bool:
    return isinstance(part, Redacted) or (isinstance(part, Thinking) and part.signer == "messages")


def _message(turn: Turn, report: Report) -> Json:
    parts = sorted(turn.parts, key=lambda part: not isinstance(part, ToolResult)) if turn.role == "user" else turn.parts
    blocks = [block for block in (_block(part, report) for part in parts) if block is not None]
    return {"role": turn.role, "content": blocks}


def _block(part: Part, report: Report) -> Json | None:
    match part:
        case Text():
            return {"type": "text", "text": part.text} if part.text.strip() else None
        case Image():
            return {"type": "image", "source": _image_source(part)}
        case Document():
            block: Json = {"type": "document", "source": _document_source(part)}
            if part.name is not None:
                block["title"] = part.name
            return block
        case Audio():
            raise wire.impossible("messages.input_audio", "an Anthropic upstream takes no audio.")
        case Thinking():
            if not _is_signed(part):
                report.drop("messages.thinking")
                return None
            return {"type": "thinking", "thinking": part.text, "signature": part.signature}
        case Redacted():
            return {"type": "redacted_thinking", "data": part.data}
        case ToolCall():
            arguments = wire.arguments_object(part.arguments)
            return {"type": "tool_use", "id": _call_id(part.id), "name": part.name, "input": arguments}
        case ToolResult():
            result: Json = {"type": "tool_result", "tool_use_id": _call_id(part.call_id)}
            inner = [block for block in (_block(piece, report) for piece in part.parts) if block is not None]
            if len(inner) == 1 and inner[0]["type"] == "text":
                result["content"] = inner[0]["text"]
            elif inner:
                result["content"] = inner
            if part.is_error:
                result["is_error"] = True
            return result


def _image_source(image: Image) -> Json:
    if image.file_id is not None:
        return {"type": "file", "file_id": image.file_id}
    media = media_of(image.url or "")
    if media is not None:
        return {"type": "base64", "media_type": media[0], "data": media[1]}
    return {"type": "url", "url": image.url}


def _document_source(document: Document) -> Json:
    if document.file_id is not None:
        return {"type": "file", "file_id": document.file_id}
    if document.text is not None:
        return {"type": "text", "media_type": "text/plain", "data": document.text}
    media = media_of(document.url or "")
    if media is not None:
        return {"type": "base64", "media_type": media[0], "data": media[1]}
    if (document.url or "").startswith(("http://", "https://")):
        return {"type": "url", "url": document.url}
    return {"type": "base64", "media_type": "application/pdf", "data": document.url or ""}


def _call_id(name: str) -> str:
    """Ids of other servers may hold what Anthropic refuses; the same id always becomes the same."""
    if re.fullmatch(r"[a-zA-Z0-9_-]+", name):
        return name
    return f"{re.sub(r'[^a-zA-Z0-9_-]', '_', name)}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _tool(tool: Tool) -> Json:
    schema = dict(tool.schema or {})
    schema.setdefault("type", "object")
    if schema["type"] == "object":
        schema.setdefault("properties", {})
    written: Json = {"name": tool.name, "input_schema": schema}
    if tool.description is not None:
        written["description"] = tool.description
    if tool.strict:
        written["strict"] = True
    return written


def _choice(conversation: Conversation) -> Json | None:
    choice = conversation.tool_choice
    alone = conversation.parallel_calls is False
    if choice is None and not alone:
        return None
    written: Json
    match choice.mode if choice is not None else "auto":
        case "required":
            written = {"type": "any"}
        case "named":
            assert choice is not None
            written = {"type": "tool", "name": choice.name}
        case mode:
            written = {"type": mode}
    if alone and written["type"] != "none":
        written["disable_parallel_tool_use"] = True
    return written
