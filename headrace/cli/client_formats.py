"""What each tool needs to talk to the gateway, in the form that the tool reads today.

Everything follows from three pieces: the address, a key and a model's name. OpenAI clients get the address with /v1,
Claude Code without, because it adds /v1/messages by itself.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

KEY_VARIABLE = "HEADRACE_API_KEY"
PROVIDER = "headrace"
KEY_PLACEHOLDER = "YOUR-KEY"
MODEL_PLACEHOLDER = "YOUR-MODEL"


@dataclass(frozen=True, slots=True)
class Pieces:
    """`root` is the gateway's address without /v1 and without a slash at the end."""

    root: str
    key: str
    model: str

    @property
    def openai_url(self) -> str:
        return self.root + "/v1"


def root_of(base_url: str) -> str:
    """http://host:8080/v1/ and http://host:8080 are the same gateway. ValueError when it is no URL."""
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{base_url} is no address such as http://127.0.0.1:8080/v1")
    root = base_url.rstrip("/")
    while root.endswith("/v1"):
        root = root.removesuffix("/v1").rstrip("/")
    return root


def codex(pieces: Pieces) -> str:
    top, table = codex_parts(pieces)
    return f"""\
# ~/.codex/config.toml
{top}
{table}
# and in the shell that starts codex:
export {KEY_VARIABLE}={shlex.quote(pieces.key)}

# Codex reads the address from config.toml only: an auth.json with {{"openai": {{"baseURL": ...}}}} has no effect on it.
"""


def codex_parts(pieces: Pieces) -> tuple[str, str]:
    """The lines for the head of Codex's config.toml, and the provider's table."""
    top = f"model = {_toml(pieces.model)}\nmodel_provider = {_toml(PROVIDER)}\n"
    table = (
        f"[model_providers.{PROVIDER}]\n"
        f'name = "Headrace"\n'
        f"base_url = {_toml(pieces.openai_url)}\n"
        f"env_key = {_toml(KEY_VARIABLE)}\n"
        f'wire_api = "responses"\n'
    )
    return top, table


def claude_code_environment(pieces: Pieces) -> dict[str, str]:
    names = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")))
    return {
        "ANTHROPIC_BASE_URL": pieces.root,
        "ANTHROPIC_AUTH_TOKEN": pieces.key,
        **dict.fromkeys(names, pieces.model),
    }


def claude_code(pieces: Pieces) -> str:
    settings = json.dumps({"env": claude_code_environment(pieces)}, indent=2, ensure_ascii=False)
    exports = "\n".join(
        f"export {name}={shlex.quote(value)}" for name, value in claude_code_environment(pieces).items()
    )
    return f"# ~/.claude/settings.json\n{settings}\n\n# or in the shell that starts claude:\n{exports}\n"


def cline(pieces: Pieces) -> str:
    settings = {
        "provider": "openai-compatible",
        "baseUrl": pieces.openai_url,
        "apiKey": pieces.key,
        "modelId": pieces.model,
    }
    return f"""\
# Cline keeps its settings in the editor: open them (the gear) and enter
API Provider   OpenAI Compatible
Base URL       {pieces.openai_url}
API Key        {pieces.key}
Model ID       {pieces.model}

# tools that take the same as JSON:
{json.dumps(settings, indent=2, ensure_ascii=False)}
"""


def continue_model(pieces: Pieces) -> dict[str, Any]:
    return {
        "name": f"Headrace {pieces.model}",
        "provider": "openai",
        "model": pieces.model,
        "apiBase": pieces.openai_url,
        "apiKey": pieces.key,
        "roles": ["chat", "edit", "apply"],
    }


def continue_item(pieces: Pieces, indent: str = "  ") -> str:
    """The model as an item of the YAML list `models`."""
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in continue_model(pieces).items()]
    return "".join(f"{indent}{'- ' if place == 0 else '  '}{line}\n" for place, line in enumerate(lines))


def continue_(pieces: Pieces) -> str:
    return f"# ~/.continue/config.yaml\n{continue_document(pieces)}"


def continue_document(pieces: Pieces) -> str:
    return f"name: Headrace\nversion: 0.0.1\nschema: v1\nmodels:\n{continue_item(pieces)}"


def openai(pieces: Pieces) -> str:
    return f"""\
# every program that uses an OpenAI SDK:
export OPENAI_BASE_URL={shlex.quote(pieces.openai_url)}
export OPENAI_API_KEY={shlex.quote(pieces.key)}

# Python:
from openai import OpenAI

client = OpenAI(base_url={json.dumps(pieces.openai_url)}, api_key={json.dumps(pieces.key)})
answer = client.chat.completions.create(
    model={json.dumps(pieces.model, ensure_ascii=False)},
    messages=[{{"role": "user", "content": "Say hello."}}],
)
print(answer.choices[0].message.content)
"""


def curl(pieces: Pieces) -> str:
    body = json.dumps(
        {"model": pieces.model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 64},
        ensure_ascii=False,
    )
    return f"""\
curl {shlex.quote(pieces.openai_url + "/chat/completions")} \\
  -H {shlex.quote("Authorization: Bearer " + pieces.key)} \\
  -H 'Content-Type: application/json' \\
  -d {shlex.quote(body)}
"""


TOOLS: Mapping[str, Callable[[Pieces], str]] = {
    "codex": codex,
    "claude-code": claude_code,
    "cline": cline,
    "continue": continue_,
    "openai": openai,
    "curl": curl,
}


def _toml(text: str) -> str:
    """A TOML basic string; JSON's escapes are a subset of TOML's."""
    return json.dumps(text, ensure_ascii=False)
