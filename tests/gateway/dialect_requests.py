"""One conversation, with a picture, a tool and its result, as each dialect would ask for its next turn."""

from __future__ import annotations

from headrace.protocol.translate.events import Dialect
from headrace.protocol.translate.wire import Json

PNG = "data:image/png;base64,iVBORw0KGgo="
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
REQUESTS: dict[Dialect, Json] = {
    "chat": {
        "model": "asked",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [
                {"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": PNG}}]},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "Rain"},
        ],
        "tools": [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_completion_tokens": 4000,
        "stop": ["END"],
        "temperature": 0.3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA, "strict": True}},
        "user": "u-1",
    },
    "messages": {
        "model": "asked",
        "max_tokens": 4000,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [
                {"type": "text", "text": "Look:"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}]},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "Rain"}]},
        ],
        "tools": [{"name": "weather", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "stop_sequences": ["END"],
        "temperature": 0.3,
        "metadata": {"user_id": "u-1"},
    },
    "responses": {
        "model": "asked",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [
                {"type": "input_text", "text": "Look:"}, {"type": "input_image", "image_url": PNG}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "Rain"},
        ],
        "tools": [{"type": "function", "name": "weather", "description": "d", "parameters": SCHEMA, "strict": False}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": 4000,
        "temperature": 0.3,
        "text": {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA}},
        "user": "u-1",
    },
}  # fmt: skip
