"""OpenAI chat completions, the request: read into a Conversation, written from one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from headrace.protocol import errors
from headrace.protocol.translate import wire
from headrace.protocol.translate.conversation import (
    MESSAGES_ONLY,
    RESPONSES_ONLY,
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
    short_identity,
    tool_name,
)
from headrace.protocol.translate.wire import Json

_READ = frozenset(
    "model messages max_tokens max_completion_tokens temperature top_p stop stream stream_options tools tool_choice "
    "parallel_tool_calls functions function_call response_format reasoning_effort user n modalities audio".split()
)


def read(body: Json) -> Conversation:
    """Raises ApiError (400) naming the field that is malformed or that no other dialect can express."""
    report = Report()
    answers = wire.optional_int(body.get("n"), "n")
    if answers is not None and answers < 1:
        raise errors.out_of_range("n", answers, "1 or more")
    if answers is not None and answers > 1:
        raise wire.impossible("n", "the upstream's dialect gives one answer a request; send the request several times.")
    if body.get("audio") or "audio" in (body.get("modalities") or ()):
        raise wire.impossible("modalities", "the upstream's dialect answers in text only.")
    tools, origins = _read_tools(body, report)
    newer = wire.optional_int(body.get("max_completion_tokens"), "max_completion_tokens")
    older = wire.optional_int(body.get("max_tokens"), "max_tokens")
    choice, allowed = _read_choice(body)
    if allowed is not None:
        tools = tuple(tool for tool in tools if tool.name in allowed)
    effort = wire.optional_string(body.get("reasoning_effort"), "reasoning_effort")
    turns: list[Turn] = []
    for path, message in wire.items(body.get("messages"), "messages"):
        turns.append(_read_message(message, path, report))
    if not turns:
        raise errors.invalid_value("messages", "`messages` is missing or empty; send at least one message.")
    return Conversation(
        turns=tuple(turns),
        tools=tools,
        tool_choice=choice,
        parallel_calls=wire.optional_bool(body.get("parallel_tool_calls"), "parallel_tool_calls"),
        max_tokens=older if newer is None else newer,
        temperature=wire.optional_number(body.get("temperature"), "temperature"),
        top_p=wire.optional_number(body.get("top_p"), "top_p"),
        stop=wire.strings(body.get("stop"), "stop"),
        stream=bool(wire.optional_bool(body.get("stream"), "stream")),
        format=_read_format(body),
        effort=effort,
        user=wire.optional_string(body.get("user"), "user"),
        others={name: value for name, value in body.items() if name not in _READ and value is not None},
        dropped=report.names,
        origins=origins,
    )


def _read_message(message: Json, path: str, report: Report) -> Turn:
    role = message.get("role")
    content = message.get("content")
    if message.get("name") and role != "function":
        report.drop("messages.name")
    if role in ("system", "developer"):
        return Turn("system", tuple(_read_parts(content, f"{path}.content")))
    if role == "user":
        return Turn("user", tuple(_read_parts(content, f"{path}.content")))
    if role in ("tool", "function"):
        call_id = message.get("tool_call_id") if role == "tool" else message.get("name")
        if not isinstance(call_id, str):
            raise errors.missing_field(f"{path}.tool_call_id", "a tool's result names the call it answers.")
        parts = [part for part in _read_parts(content, f"{path}.content") if isinstance(part, Text | Image | Document)]
        return Turn("user", (ToolResult(call_id, tuple(parts)),))
    if role == "assistant":
        return Turn("assistant", tuple(_assistant_parts(message, path, report)))
    raise errors.invalid_value(
        f"{path}.role", f"`{path}.role` is {errors.quoted(role)}; use system, developer, user, assistant or tool."
    )


def _assistant_parts(message: Json, path: str, report: Report) -> Iterable[Part]:
    thought = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thought, str) and thought:
        yield Thinking(thought)
    yield from _read_parts(message.get("content"), f"{path}.content", may_be_absent=True)
    refusal = wire.optional_string(message.get("refusal"), f"{path}.refusal")
    if refusal:
        yield Text(refusal)
    for place, call in wire.items(message.get("tool_calls"), f"{path}.tool_calls"):
        shape = "custom" if call.get("type") == "custom" else "function"
        called = wire.mapping(call.get(shape), f"{place}.{shape}")
        name = tool_name(wire.string(called.get("name"), f"{place}.{shape}.name"))
        if shape == "custom":
            arguments = wire.encode_text({"input": wire.string(called.get("input"), f"{place}.custom.input")})
        else:
            arguments = wire.arguments_text(called.get("arguments"))
        yield ToolCall(wire.string(call.get("id"), f"{place}.id"), name, arguments)
    old = wire.optional_mapping(message.get("function_call"), f"{path}.function_call")
    if old is not None:
        name = wire.string(old.get("name"), f"{path}.function_call.name")
        yield ToolCall(name, tool_name(name), wire.arguments_text(old.get("arguments")))
    if message.get("audio"):
        report.drop("messages.audio")


def _read_parts(content: object, path: str, *, may_be_absent: bool = False) -> Iterable[Part]:
    if content is None and may_be_absent:
        return
    if isinstance(content, str):
        if content:
            yield Text(content)
        return
    if not isinstance(content, list):
        raise errors.invalid_type(path, "a string or a list of parts", wire.kind(content))
    for place, part in wire.items(content, path):
        yield _read_part(part, place)


def _read_part(part: Json, path: str) -> Part:
    match part.get("type"):
        case "text" | "input_text" | "output_text":
            return Text(wire.string(part.get("text"), f"{path}.text"))
        case "refusal":
            return Text(wire.string(part.get("refusal"), f"{path}.refusal"))
        case "image_url":
            image = part.get("image_url")
            if isinstance(image, str):
                return Image(url=image)
            image = wire.mapping(image, f"{path}.image_url")
            detail = wire.optional_string(image.get("detail"), f"{path}.image_url.detail")
            return Image(url=wire.string(image.get("url"), f"{path}.image_url.url"), detail=detail)
        case "file":
            file = wire.mapping(part.get("file"), f"{path}.file")
            url, file_id, name = (
                wire.optional_string(file.get(field), f"{path}.file.{field}")
                for field in ("file_data", "file_id", "filename")
            )
            return Document(url=url, file_id=file_id, name=name)
        case "input_audio":
            audio = wire.mapping(part.get("input_audio"), f"{path}.input_audio")
            return Audio(wire.string(audio.get("data"), f"{path}.input_audio.data"), str(audio.get("format") or "wav"))
        case other:
            raise wire.impossible(f"{path}.type", f"a part of type {errors.quoted(other)} has no translation.")


def _read_tools(body: Json, report: Report) -> tuple[tuple[Tool, ...], dict[str, ToolOrigin]]:
    tools: list[Tool] = []
    origins: list[ToolOrigin] = []
    for path, tool in wire.items(body.get("tools"), "tools"):
        shape = tool.get("type", "function")
        if shape not in ("function", "custom"):
            report.drop(f"tools.{shape}")
            continue
        described = wire.mapping(tool.get(shape), f"{path}.{shape}")
        origin = ToolOrigin(wire.string(described.get("name"), f"{path}.{shape}.name"), custom=shape == "custom")
        origins.append(origin)
        tools.append(read_tool(described, origin, f"{path}.{shape}", report))
    for path, described in wire.items(body.get("functions"), "functions"):
        origin = ToolOrigin(wire.string(described.get("name"), f"{path}.name"))
        origins.append(origin)
        tools.append(read_tool(described, origin, path, report))
    return tuple(tools), origins_of(origins)


def read_tool(described: Json, origin: ToolOrigin, path: str, report: Report) -> Tool:
    """A tool from {"name", "description", "parameters", "strict"}; one that takes free text becomes a function
    with the one parameter `input`."""
    description = wire.optional_string(described.get("description"), f"{path}.description")
    name = tool_name(origin.name, origin.namespace)
    if not origin.custom:
        schema = wire.optional_mapping(described.get("parameters"), f"{path}.parameters")
        return Tool(name, description, schema, wire.optional_bool(described.get("strict"), f"{path}.strict"), path)
    grammar = described.get("format")
    if isinstance(grammar, dict) and grammar.get("type") == "grammar":
        report.drop("tools.format")
        nested = grammar.get("grammar")
        rules = nested if isinstance(nested, dict) else grammar
        description = (
            f"{description or ''}\n\nThe input must follow this grammar:\n{rules.get('definition', '')}".strip()
        )
    text = {"type": "string", "description": "The whole input of the tool, as plain text."}
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    return Tool(name, description, schema, path=path)


def _read_choice(body: Json) -> tuple[ToolChoice | None, frozenset[str] | None]:
    """The choice, and the names of the tools that it leaves."""
    choice = body.get("tool_choice", body.get("function_call"))
    if choice is None:
        return None, None
    if isinstance(choice, str):
        return plain_choice(choice), None
    choice = wire.mapping(choice, "tool_choice")
    shape = choice.get("type", "function")
    if shape == "allowed_tools":
        allowed = wire.mapping(choice.get("allowed_tools"), "tool_choice.allowed_tools")
        entries = wire.items(allowed.get("tools"), "tool_choice.allowed_tools.tools")
        names = frozenset(
            tool_name(str(wire.at(tool, str(tool.get("type", "function")), "name"))) for _, tool in entries
        )
        return plain_choice(allowed.get("mode", "auto")), names
    name = wire.at(choice, str(shape), "name") or choice.get("name")
    return ToolChoice("named", tool_name(wire.string(name, "tool_choice.function.name"))), None


def plain_choice(choice: object) -> ToolChoice:
    match choice:
        case "auto" | "none" | "required":
            return ToolChoice(choice)
        case "any":
            return ToolChoice("required")
    raise errors.invalid_value(
        "tool_choice", f"`tool_choice` is {errors.quoted(choice)}; use auto, none, required or one tool's name."
    )


def _read_format(body: Json) -> Json | None:
    format = wire.optional_mapping(body.get("response_format"), "response_format")
    if format is None or format.get("type") == "text":
        return None
    if format.get("type") == "json_schema":
        schema = wire.mapping(format.get("json_schema"), "response_format.json_schema")
        return {**schema, "type": "json_schema"}
    return known_format(format, "response_format")


def known_format(format: Json, path: str) -> Json:
    """The wished form of the answer, checked. Raises ApiError (400) for one that has no name here."""
    if format.get("type") not in ("json_schema", "json_object"):
        found = errors.quoted(format.get("type"))
        raise errors.invalid_value(f"{path}.type", f"`{path}.type` is {found}; use text, json_object or json_schema.")
    return format


# writing


def write(
    conversation: Conversation, *, model: str, max_tokens_field: str, takes_effort: bool, continues: bool = False
) -> tuple[Json, tuple[str, ...]]:
    """The body for a chat upstream and the names of the fields that were left out. Raises ApiError (400).

    `continues`: the upstream can go on with an answer that the client has begun, as Headrace and vLLM can.
    """
    report = Report(conversation.dropped)
    body: Json = {"model": model, "messages": _messages(conversation.turns, report)}
    if not body["messages"]:
        raise errors.invalid_value("messages", "the request has no message with any content.")
    if conversation.begins_answer and continues:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    elif conversation.begins_answer:
        report.drop("messages.prefill")
    if conversation.max_tokens is not None:
        body[max_tokens_field] = conversation.max_tokens
    for name, value in (("temperature", conversation.temperature), ("top_p", conversation.top_p)):
        if value is not None:
            body[name] = value
    if conversation.stop:
        body["stop"] = list(conversation.stop)
    if conversation.tools:
        body["tools"] = [_tool(tool) for tool in conversation.tools]
        if conversation.tool_choice is not None:
            body["tool_choice"] = _choice(conversation.tool_choice)
        if conversation.parallel_calls is not None:
            body["parallel_tool_calls"] = conversation.parallel_calls
    if conversation.format is not None:
        body["response_format"] = _format(conversation.format)
    effort = effort_of(conversation)
    if effort is not None and takes_effort:
        body["reasoning_effort"] = effort
    elif conversation.thinking == "off" or effort is not None:
        report.drop("thinking" if conversation.thinking is not None else "reasoning_effort")
    if conversation.user is not None:
        body["user"] = short_identity(conversation.user)
    alien = MESSAGES_ONLY | RESPONSES_ONLY
    body |= {name: value for name, value in conversation.others.items() if name not in alien and name not in body}
    report.drop_fields({name: value for name, value in conversation.others.items() if name in alien})
    if conversation.stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    return body, report.names


def effort_of(conversation: Conversation) -> str | None:
    """What was said of effort, or what a budget of thinking tokens amounts to."""
    if conversation.effort is not None or conversation.thinking != "on":
        return conversation.effort
    budget = conversation.thinking_budget_tokens or 0
    return "low" if budget < 4096 else "medium" if budget < 16384 else "high"


def _messages(turns: Sequence[Turn], report: Report) -> list[Json]:
    messages: list[Json] = []
    turns = merged(turns)
    current = current_turn(turns)
    for place, turn in enumerate(turns):
        match turn.role:
            case "system":
                text = "\n\n".join(part.text for part in turn.parts if isinstance(part, Text))
                messages.append({"role": "system", "content": text})
            case "user":
                messages.extend(_user_messages(turn, report))
            case "assistant":
                message = _assistant_message(turn, report, with_thinking=place >= current)
                if len(message) > 1:
                    messages.append(message)
    return messages


def _user_messages(turn: Turn, report: Report) -> Iterable[Json]:
    """Tool results are messages of their own, and come first; pictures in them follow as the user's."""
    said: list[Part] = []
    for part in turn.parts:
        if not isinstance(part, ToolResult):
            said.append(part)
            continue
        if part.is_error:
            report.drop("tool_result.is_error")
        texts = [inner.text for inner in part.parts if isinstance(inner, Text)]
        said.extend(inner for inner in part.parts if not isinstance(inner, Text))
        yield {"role": "tool", "tool_call_id": part.call_id, "content": "\n\n".join(texts)}
    if said:
        yield {"role": "user", "content": _content(said)}


def _content(parts: Sequence[Part]) -> str | list[Json]:
    """Text alone is a string, which every server takes."""
    texts = [part.text for part in parts if isinstance(part, Text)]
    if len(texts) == len(parts):
        return "\n\n".join(texts)
    return [_part(part) for part in parts]


def _part(part: Part) -> Json:
    match part:
        case Text():
            return {"type": "text", "text": part.text}
        case Image(url=str()):
            image: Json = {"url": part.url}
            if part.detail is not None:
                image["detail"] = part.detail
            return {"type": "image_url", "image_url": image}
        case Document(text=str()):
            return {"type": "text", "text": part.text if part.name is None else f"{part.name}:\n{part.text}"}
        case Document():
            file: Json = {"filename": part.name} if part.name else {}
            if part.file_id is not None:
                file["file_id"] = part.file_id
            elif part.url is not None and media_of(part.url) is not None:
                file["file_data"] = part.url
            else:
                raise wire.impossible("messages.document", "a chat upstream takes files inline only, not by address.")
            return {"type": "file", "file": file}
        case Audio():
            return {"type": "input_audio", "input_audio": {"data": part.data, "format": part.format}}
        case Image():
            raise wire.impossible(
                "messages.content", "a chat upstream takes pictures by address or inline, not by file id."
            )
    raise errors.invalid_value(
        "messages.content", "A user's message holds a tool call or a thought; only an assistant's message may."
    )


def _assistant_message(turn: Turn, report: Report, *, with_thinking: bool) -> Json:
    message: Json = {"role": "assistant"}
    texts = [part.text for part in turn.parts if isinstance(part, Text)]
    calls = [part for part in turn.parts if isinstance(part, ToolCall)]
    thoughts = [part.text for part in turn.parts if isinstance(part, Thinking) and part.text]
    if any(isinstance(part, Redacted) for part in turn.parts):
        report.drop("redacted_thinking")
    if thoughts and with_thinking:
        message["reasoning_content"] = "\n\n".join(thoughts)
    if texts:
        message["content"] = "".join(texts)
    if calls:
        message.setdefault("content", None)
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    if "reasoning_content" in message:
        message.setdefault("content", "")
    return message


def _tool(tool: Tool) -> Json:
    function: Json = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.schema is not None:
        function["parameters"] = tool.schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> Any:
    if choice.mode != "named":
        return choice.mode
    return {"type": "function", "function": {"name": choice.name}}


def _format(format: Any) -> Json:
    if format["type"] != "json_schema":
        return dict(format)
    schema = {name: value for name, value in format.items() if name != "type"}
    schema.setdefault("name", "answer")
    return {"type": "json_schema", "json_schema": schema}
