"""What turns messages and text into tokens and back for the served model: its tokenizer and its chat template.

Read from the model's files as the flags change them, by the server and by `--dry-run`.
"""

from __future__ import annotations

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
        return ModelText(tokenizer, None, problem)
    return ModelText(tokenizer, template)
