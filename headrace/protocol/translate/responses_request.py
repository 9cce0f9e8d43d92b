"""OpenAI responses, the request: read into a Conversation, written from one.

The input is a row of items (messages, calls, outputs, reasoning), not of turns; neighbouring items of the model
are one turn. Tools the upstream cannot run (web_search, image_generation, local_shell) are left out and
reported; `custom` ones and those of a `namespace` become functions and are named back in the answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.protocol import errors
from headrace.protocol.translate import wire
from headrace.protocol.translate.chat_request import effort_of, known_format, plain_choice, read_tool
from headrace.protocol.translate.conversation import (
    CHAT_ONLY,
    MESSAGES_ONLY,
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
    media_of,
    merged,
    origins_of,
    short_identity,
    tool_name,
)
from headrace.protocol.translate.signatures import signer_of
from headrace.protocol.translate.wire import Json

_READ = frozenset(
    "model input instructions max_output_tokens temperature top_p stream stream_options tools tool_choice "
    "parallel_tool_calls text reasoning user previous_response_id conversation prompt background store include".split()
)
_NEEDS_MEMORY = {
    "previous_response_id": "this server keeps no answers; send the whole history in `input`.",
    "conversation": "this server keeps no conversations; send the whole history in `input`.",
    "prompt": "this server keeps no prompts; send the text in `instructions` and `input`.",
}
_HISTORY_OF_HOSTED_TOOLS = ("_call", "_call_output", "_output", "compaction")


def read(body: Json) -> Conversation:
    """Raises ApiError (400) naming the field that is malformed or that no other dialect can express."""
    report = Report()
    for name, why in _NEEDS_MEMORY.items():
        if body.get(name) is not None:
            raise wire.impossible(name, why)
    if body.get("background"):
        raise wire.impossible("background", "the upstream answers only while the client waits.")
    if body.get("store"):
        report.drop("store")
    for name in wire.strings(body.get("include"), "include"):
        if name != "reasoning.encrypted_content":
            report.drop(f"include.{name}")
    tools, origins = _read_tools(body, report)
    choice, allowed = _read_choice(body, report)
    if allowed is not None:
        tools = tuple(tool for tool in tools if tool.name in allowed)
    text = wire.optional_mapping(body.get("text"), "text") or {}
    format = wire.optional_mapping(text.get("format"), "text.format")
    reasoning = wire.optional_mapping(body.get("reasoning"), "reasoning") or {}
    turns = []
    instructions = wire.optional_string(body.get("instructions"), "instructions")
    if instructions:
        turns.append(Turn("system", (Text(instructions),)))
    turns.extend(_read_input(body.get("input"), report))
    if not any(turn.parts for turn in turns):
        raise errors.invalid_value("input", "`input` is missing or empty; send a text or at least one item.")
    others = {name: value for name, value in body.items() if name not in _READ and value is not None}
    if text.get("verbosity") is not None:
        others["verbosity"] = text["verbosity"]
    return Conversation(
        turns=tuple(merged(turns)),
        tools=tools,
        tool_choice=choice,
        parallel_calls=wire.optional_bool(body.get("parallel_tool_calls"), "parallel_tool_calls"),
        max_tokens=wire.optional_int(body.get("max_output_tokens"), "max_output_tokens"),
        temperature=wire.optional_number(body.get("temperature"), "temperature"),
        top_p=wire.optional_number(body.get("top_p"), "top_p"),
        stream=bool(wire.optional_bool(body.get("stream"), "stream")),
        format=None if format is None or format.get("type") == "text" else known_format(format, "text.format"),
        effort=wire.optional_string(reasoning.get("effort"), "reasoning.effort"),
        user=wire.optional_string(body.get("user"), "user"),
        others=others,
        dropped=report.names,
        origins=origins,
    )


def _read_input(input: object, report: Report) -> Iterable[Turn]:
    if isinstance(input, str):
        yield Turn("user", (Text(input),) if input else ())
        return
    for path, item in wire.items(input, "input"):
        turn = _read_item(item, path, report)
        if turn is not None:
            yield turn


def _read_item(item: Json, path: str, report: Report) -> Turn | None:
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            parts = tuple(_read_content(item.get("content"), f"{path}.content"))
            if role in ("system", "developer"):
                return Turn("system", parts)
            if role not in ("user", "assistant"):
                raise errors.invalid_value(
                    f"{path}.role", f"`{path}.role` is {errors.quoted(role)}; use user, assistant, system or developer."
                )
            return Turn(role, parts)
        case "function_call" | "custom_tool_call" as shape:
            namespace = wire.optional_string(item.get("namespace"), f"{path}.namespace")
            name = tool_name(wire.string(item.get("name"), f"{path}.name"), namespace)
            if shape == "custom_tool_call":
                arguments = wire.encode_text({"input": wire.string(item.get("input"), f"{path}.input")})
            else:
                arguments = wire.arguments_text(item.get("arguments"))
            return Turn("assistant", (ToolCall(wire.string(item.get("call_id"), f"{path}.call_id"), name, arguments),))
        case "function_call_output" | "custom_tool_call_output":
            told = tuple(_read_content(item.get("output"), f"{path}.output"))
            shown = tuple(part for part in told if isinstance(part, Text | Image | Document))
            return Turn("user", (ToolResult(wire.string(item.get("call_id"), f"{path}.call_id"), shown),))
        case "reasoning":
            return Turn("assistant", tuple(_read_reasoning(item, path)))
        case "item_reference":
            raise wire.impossible(path, "this server keeps no items; send the item itself.")
        case str() as other if other.endswith(_HISTORY_OF_HOSTED_TOOLS):
            report.drop(f"input.{other}")
            return None
        case other:
            raise wire.impossible(f"{path}.type", f"an item of type {errors.quoted(other)} has no translation.")


def _read_reasoning(item: Json, path: str) -> Iterable[Part]:
    texts = [
        wire.string(part.get("text"), f"{place}.text")
        for name in ("summary", "content")
        for place, part in wire.items(item.get(name), f"{path}.{name}")
    ]
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and sealed.startswith("redacted."):
        yield Redacted(sealed.removeprefix("redacted."))
        return
    signer, signature = signer_of(sealed, "responses")
    if texts or signature:
        yield Thinking("\n\n".join(texts), signature, signer)


def _read_content(content: object, path: str) -> Iterable[Part]:
    if isinstance(content, str):
        if content:
            yield Text(content)
        return
    if not isinstance(content, list):
        raise errors.invalid_type(path, "a string or a list of parts", wire.kind(content))
    for place, part in wire.items(content, path):
        match part.get("type"):
            case "input_text" | "output_text" | "text":
                yield Text(wire.string(part.get("text"), f"{place}.text"))
            case "refusal":
                yield Text(wire.string(part.get("refusal"), f"{place}.refusal"))
            case "input_image":
                url, file_id, detail = _texts_of(part, place, "image_url", "file_id", "detail")
                yield Image(url=url, file_id=file_id, detail=detail)
            case "input_file":
                data, url, file_id, name = _texts_of(part, place, "file_data", "file_url", "file_id", "filename")
                yield Document(url=data or url, file_id=file_id, name=name)
            case "input_audio":
                audio = wire.mapping(part.get("input_audio"), f"{place}.input_audio")
                yield Audio(str(audio.get("data", "")), str(audio.get("format", "wav")))
            case other:
                raise wire.impossible(f"{place}.type", f"a part of type {errors.quoted(other)} has no translation.")


def _texts_of(part: Json, path: str, *names: str) -> list[str | None]:
    return [wire.optional_string(part.get(name), f"{path}.{name}") for name in names]


def _read_tools(body: Json, report: Report) -> tuple[tuple[Tool, ...], dict[str, ToolOrigin]]:
    tools: list[Tool] = []
    origins: list[ToolOrigin] = []
    for path, tool in wire.items(body.get("tools"), "tools"):
        namespace = wire.string(tool.get("name"), f"{path}.name") if tool.get("type") == "namespace" else None
        entries = wire.items(tool.get("tools"), f"{path}.tools") if namespace is not None else [(path, tool)]
        for place, entry in entries:
            shape = entry.get("type", "function")
            if shape not in ("function", "custom"):
                report.drop(f"tools.{shape}")
                continue
            name = wire.string(entry.get("name"), f"{place}.name")
            origin = ToolOrigin(name, namespace, custom=shape == "custom")
            origins.append(origin)
            tools.append(read_tool(entry, origin, place, report))
    return tuple(tools), origins_of(origins)


def _read_choice(body: Json, report: Report) -> tuple[ToolChoice | None, frozenset[str] | None]:
    choice = body.get("tool_choice")
    if choice is None:
        return None, None
    if isinstance(choice, str):
        return plain_choice(choice), None
    choice = wire.mapping(choice, "tool_choice")
    shape = choice.get("type")
    if shape == "allowed_tools":
        entries = wire.items(choice.get("tools"), "tool_choice.tools")
        names = frozenset(
            tool_name(str(tool.get("name")), wire.optional_string(tool.get("namespace"), f"{place}.namespace"))
            for place, tool in entries
        )
        return plain_choice(choice.get("mode", "auto")), names
    if shape in ("function", "custom"):
        name = wire.string(choice.get("name"), "tool_choice.name")
        namespace = wire.optional_string(choice.get("namespace"), "tool_choice.namespace")
        return ToolChoice("named", tool_name(name, namespace)), None
    raise wire.impossible("tool_choice", f"the upstream has no tool of type {errors.quoted(shape)} to be made to use.")


# writing


def write(conversation: Conversation, *, model: str) -> tuple[Json, tuple[str, ...]]:
    """The body for an upstream that speaks responses, and the names of the fields that were left out."""
    report = Report(conversation.dropped)
    input_items = [item for turn in conversation.turns for item in _items(turn, report)]
    body: Json = {"model": model, "input": input_items, "store": False}
    if not input_items:
        raise errors.invalid_value("messages", "the request has no message with any content.")
    for name, value in (
        ("max_output_tokens", conversation.max_tokens),
        ("temperature", conversation.temperature),
        ("top_p", conversation.top_p),
    ):
        if value is not None:
            body[name] = value
    if conversation.stop:
        report.drop("stop")
    if conversation.begins_answer:
        report.drop("messages.prefill")
    if conversation.tools:
        body["tools"] = [_tool(tool) for tool in conversation.tools]
        if conversation.tool_choice is not None:
            body["tool_choice"] = _choice(conversation.tool_choice)
        if conversation.parallel_calls is not None:
            body["parallel_tool_calls"] = conversation.parallel_calls
    others = dict(conversation.others)
    text: Json = {}
    if conversation.format is not None:
        text["format"] = {
            **({"name": "answer"} if conversation.format["type"] == "json_schema" else {}),
            **conversation.format,
        }
    if isinstance(others.get("verbosity"), str):
        text["verbosity"] = others.pop("verbosity")
    if text:
        body["text"] = text
    effort = effort_of(conversation)
    if effort is not None:
        body["reasoning"] = {"effort": effort, "summary": "auto"}
        body["include"] = ["reasoning.encrypted_content"]
    elif conversation.thinking == "off":
        report.drop("thinking")
    if conversation.user is not None:
        body["user"] = short_identity(conversation.user)
    alien = CHAT_ONLY | MESSAGES_ONLY
    body |= {name: value for name, value in others.items() if name not in alien and name not in body}
    report.drop_fields({name: value for name, value in others.items() if name in alien})
    if conversation.stream:
        body["stream"] = True
    return body, report.names


def _items(turn: Turn, report: Report) -> Iterable[Json]:
    said: list[Part] = []
    for part in turn.parts:
        item = _item(part, report)
        if item is None:
            if not isinstance(part, Thinking | Redacted):
                said.append(part)
            continue
        if said:
            yield _message(turn, said)
            said = []
        yield item
    if said:
        yield _message(turn, said)


def _item(part: Part, report: Report) -> Json | None:
    """Parts that are items of their own; None for those that a message holds, and for thinking nobody can check."""
    match part:
        case ToolCall():
            return {"type": "function_call", "call_id": part.id, "name": part.name, "arguments": part.arguments}
        case ToolResult():
            if part.is_error:
                report.drop("tool_result.is_error")
            texts = [inner.text for inner in part.parts if isinstance(inner, Text)]
            output: Any = "\n\n".join(texts)
            if len(texts) < len(part.parts):
                output = [_content(inner) for inner in part.parts]
            return {"type": "function_call_output", "call_id": part.call_id, "output": output}
        case Thinking(signer="responses"):
            summary = [{"type": "summary_text", "text": part.text}] if part.text else []
            return {"type": "reasoning", "summary": summary, "encrypted_content": part.signature}
        case Thinking() | Redacted():
            report.drop("messages.thinking")
    return None


def _message(turn: Turn, parts: list[Part]) -> Json:
    if turn.role == "assistant":
        text = "".join(part.text for part in parts if isinstance(part, Text))
        return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    role = "developer" if turn.role == "system" else "user"
    return {"type": "message", "role": role, "content": [_content(part) for part in parts]}


def _content(part: Part) -> Json:
    match part:
        case Text():
            return {"type": "input_text", "text": part.text}
        case Image():
            image: Json = {"type": "input_image", "detail": part.detail or "auto"}
            return {**image, **({"file_id": part.file_id} if part.file_id else {"image_url": part.url})}
        case Document(text=str()):
            return {"type": "input_text", "text": part.text if part.name is None else f"{part.name}:\n{part.text}"}
        case Document():
            file: Json = {"type": "input_file"}
            if part.file_id is not None:
                return {**file, "file_id": part.file_id}
            inline = media_of(part.url or "") is not None
            named = {"filename": part.name or "file"} if inline else {}
            return {**file, **named, "file_data" if inline else "file_url": part.url}
        case Audio():
            return {"type": "input_audio", "input_audio": {"data": part.data, "format": part.format}}
    raise wire.impossible("input", "this part has no place in a message.")


def _tool(tool: Tool) -> Json:
    written: Json = {"type": "function", "name": tool.name, "parameters": tool.schema, "strict": bool(tool.strict)}
    if tool.description is not None:
        written["description"] = tool.description
    return written


def _choice(choice: ToolChoice) -> Any:
    return choice.mode if choice.mode != "named" else {"type": "function", "name": choice.name}
