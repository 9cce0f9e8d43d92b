"""What turns messages and text into tokens and back for the served model: its tokenizer and its chat template.

Read from the model's files as the flags change them, by the server and by `--dry-run`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from headrace.config.errors import ConfigError
from headrace.config.model_files import ModelFiles
from headrace.config.settings import EngineSettings, ServerSettings
from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelText:
    tokenizer: Tokenizer
    template: ChatTemplate | None
    tool_template: ChatTemplate | None = None
    """For requests with tools, where the model has one of its own for them."""
    problem: str | None = None
    """Why the model's own template is left out."""


def model_text(engine: EngineSettings, server: ServerSettings, files: ModelFiles) -> ModelText:
    """Raises ConfigError for a tokenizer that cannot be used, or a template given by flag that cannot."""
    override = Path(engine.tokenizer) if engine.tokenizer is not None else None
    tokenizer = Tokenizer.load(files, override)
    source = server.chat_template or files.chat_template
    if source is None:
        return ModelText(tokenizer, None)
    tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    try:
        template = ChatTemplate(source, {name: token for name, token in tokens.items() if token is not None})
    except ValueError as error:
        if server.chat_template is not None:
            raise ConfigError(f"--chat-template: {error}.") from error
        problem = f"The model's own template is left out: {error}. Give one with --chat-template."
        return ModelText(tokenizer, None, problem=problem)
    for_tools = files.chat_templates.get("tool_use") if server.chat_template is None else None
    tool_template = None
    if for_tools is not None:
        with contextlib.suppress(ValueError):  # The other template does without.
            tool_template = ChatTemplate(for_tools, tokenizer.special_tokens)
    return ModelText(tokenizer, template, tool_template)
