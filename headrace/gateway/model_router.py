"""A model whose requests a function of yours distributes: `[models.auto] router = "python:MODULE:FUNCTION"`.

    def choose(question):                                   # in MODULE.py beside the configuration, or installed
        return "large" if len(question.body["messages"]) > 6 else "small"

It names one of the model's targets, which is tried first; the others stay behind it. The function runs on the event
loop, beside all other requests: what takes it a millisecond takes everybody a millisecond. One that fails, or names
what is no target, changes nothing and is logged, without a word of the prompt.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.gateway.rules import RequestFacts

logger = logging.getLogger("headrace.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a router is asked."""

    candidates: tuple[str, ...]
    """The models' names at the targets, first choice first."""
    body: Mapping[str, Any]
    """The request as the client sent it, in its dialect."""
    endpoint: str
    """chat, completions, messages, responses, ..."""
    prompt_tokens: int
    """An estimate."""
    key_name: str
    key_tags: tuple[str, ...]


Choose = Callable[[Question], str | None]


@dataclass(frozen=True, slots=True)
class Router:
    """`written` as the configuration has it."""

    written: str
    choose: Choose

    def first(self, candidates: tuple[str, ...], body: Mapping[str, Any], facts: RequestFacts) -> str | None:
        """The candidate to ask first; None = as they stand."""
        question = Question(
            candidates=candidates,
            body=body,
            endpoint=facts.endpoint,
            prompt_tokens=facts.prompt_tokens,
            key_name=facts.key_name,
            key_tags=facts.key_tags,
        )
        try:
            chosen = self.choose(question)
        except Exception as error:  # whatever a function of somebody else's raises; its text may quote the prompt
            logger.warning(
                "The router %s failed with %s; the first target is asked.", self.written, type(error).__name__
            )
            return None
        if chosen is not None and chosen not in candidates:
            logger.warning("The router %s named what is none of %s.", self.written, ", ".join(candidates))
            return None
        return chosen


def load_router(written: str, folder: Path) -> tuple[Router, Path | None]:
    """The router and the file it stands in, where that is beside the configuration. Raises ValueError."""
    kind, _, rest = written.partition(":")
    module_name, _, function_name = rest.partition(":")
    if kind != "python" or not module_name or not function_name.isidentifier():
        raise ValueError('is not of the form "python:MODULE:FUNCTION"')
    beside = folder / (module_name.replace(".", "/") + ".py")
    path = beside if beside.is_file() else None
    try:
        module = importlib.import_module(module_name) if path is None else _loaded(module_name, path)
    except Exception as error:  # a module of somebody else's may raise anything
        raise ValueError(f"cannot be loaded: {type(error).__name__}: {error}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"names {function_name}, which is no function of {module_name}")
    return Router(written, function), path


def _loaded(name: str, path: Path) -> ModuleType:
    """Read anew each time, so that a change of the file is one of the configuration."""
    module = ModuleType(name)
    module.__file__ = str(path)
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    return module
