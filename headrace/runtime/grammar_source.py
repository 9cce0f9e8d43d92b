"""Compiles a GrammarSpec with the grammar library, llguidance, under limits that bound what any grammar may cost.

A JSON Schema at fault is named by the path of its innermost part that fails by itself in the same way.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from headrace.protocol.ipc import GrammarSpec
from headrace.runtime.grammar import DeadEnd, Grammar, GrammarError, TokenKinds, TooCostly, mask_of
from headrace.runtime.grammar_check import GrammarCheck, Words
from headrace.runtime.grammar_store import SHORT_CHARS
from headrace.text.tokenizer import Tokenizer

LIMITS = llguidance.LLParserLimits(
    max_grammar_size=20_000,  # symbols; some 2,000 optional properties, which take half a second
    max_items_in_row=10_000,
    max_lexer_states=20_000,  # of 1 to 2 kB, and every sequence has its own
    step_lexer_fuel=100_000,  # of one mask: 7 ms
    verbose_errors=False,
)
MAX_GRAMMAR_CHARS = 32_768
"""Of a GBNF or Lark text: reading it holds up the engine's other thread."""
MAX_FIRST_MASK_S = 0.005
"""Processor time of the first mask, when it is made for the second time."""
BLAME_S = 0.1
"""How long the part at fault may be looked for."""

_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_FAULT_IN_SCHEMA = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema")
_UNSUPPORTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")


class GrammarCompiler:
    """Compiles for one model, in two threads at the most: one for short texts, one for long. Others run meanwhile."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size` is the width of the logits. Takes half a second for 50,000 tokens, and 25 MB."""
        known = min(tokenizer.vocab_size, vocab_size)
        token_bytes = [tokenizer.token_bytes(token_id) for token_id in range(known)] + [b""] * (vocab_size - known)
        stops = [token_id for token_id in tokenizer.eos_token_ids if token_id < vocab_size]
        digits = [token_id for token_id, text in enumerate(token_bytes) if text[:1].isdigit()]
        zeros = [token_id for token_id in digits if token_bytes[token_id].startswith(b"0")]
        width = -(-vocab_size // 32)
        self._kinds = TokenKinds(token_bytes, mask_of(digits, width), mask_of(zeros, width))
        # A model without an end token has one here that it never generates, so its answers end by being complete.
        words = Words(token_bytes, [i for i in range(known) if tokenizer.is_special(i)], stops)
        self._checks = {is_short: GrammarCheck(words) for is_short in (True, False)}
        view: Any = _LibraryView(token_bytes, tokenizer, stops[0] if stops else vocab_size - 1)
        self._library = llguidance.LLTokenizer(view, n_vocab=vocab_size, eos_token=stops or None)

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Takes some milliseconds, at the worst a few seconds. Raises GrammarError."""
        if not self._checks[len(spec.text) <= SHORT_CHARS].survives(spec):
            raise GrammarError(f"`{spec.field}` takes too much time or memory to be compiled.", spec.field)
        matcher = llguidance.LLMatcher(self._library, library_grammar(spec), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise _grammar_error(spec, matcher.get_error())
        first = Grammar(self._kinds, matcher, (), False).start()
        nothing = np.zeros(0, np.int32)
        try:
            # The first mask is the dearest, and copies of the matcher keep what it learnt.
            first.mask(nothing)
        except TooCostly as error:
            raise GrammarError(f"`{spec.field}` is too costly to follow: {error}.", spec.field) from None
        except DeadEnd as error:
            raise GrammarError(f"`{spec.field}` allows no text at all: {error}.", spec.field) from None
        started_s = time.thread_time()
        first.matcher.compute_bitmask()
        if time.thread_time() - started_s > MAX_FIRST_MASK_S:
            raise GrammarError(f"`{spec.field}` is too costly to follow: it has too many ways to begin.", spec.field)
        return Grammar(self._kinds, first.matcher, spec.after_token_ids, spec.kind in ("json_schema", "lark"))


class _LibraryView:
    """What the library asks of a tokenizer: attributes with the names it looks for."""

    is_tokenizer_wrapper = True

    def __init__(self, token_bytes: list[bytes], tokenizer: Tokenizer, eos_token_id: int) -> None:
        self.tokens = token_bytes
        self.eos_token_id = eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = [token_id for token_id in range(len(token_bytes)) if tokenizer.is_special(token_id)]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        """How the model would spell forced text."""
        whole = text if isinstance(text, str) else text.decode("utf-8", errors="replace")
        return self._tokenizer.encode(whole, add_special_tokens=False)


def library_grammar(spec: GrammarSpec) -> str:
    """Raises GrammarError for a grammar text that cannot be read."""
    match spec.kind:
        case "json_schema":
            return str(llguidance.LLMatcher.grammar_from_json_schema(spec.text))
        case "regex":
            return str(llguidance.LLMatcher.grammar_from_regex(_unanchored(spec.text)))
        case "choice":
            choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(spec.text))
            return f"start: CHOICE\nCHOICE: {choices}\n"
        case "grammar":
            return _lark(spec.text, spec.field)
        case "lark":
            return spec.text


def _unanchored(regex: str) -> str:
    """Without `^` and `$` around it: it is for the whole text anyhow, and the library knows no anchors."""
    regex = regex.removeprefix("^")
    if regex.endswith("$") and (len(regex) - len(regex[:-1].rstrip("\\")) - 1) % 2 == 0:
        return regex[:-1]
    return regex


def _lark(text: str, field: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARS:
        message = f"`{field}` has {len(text):,} characters; a grammar may have {MAX_GRAMMAR_CHARS:,}."
        raise GrammarError(message, field)
    if "::=" not in text:
        return text
    try:
        return str(any_to_lark(_ESCAPED.sub(_character, text)))
    except RecursionError:
        raise GrammarError(f"`{field}` is nested too deeply.", field) from None
    except Exception as error:  # the library raises bare ones
        raise GrammarError(f"`{field}` is no grammar that can be read: {error}", field) from None


def _character(escape: re.Match[str]) -> str:
    code = int(escape[1] or escape[2], 16)
    plain = 0x20 <= code < 0x110000 and not 0xD800 <= code < 0xE000 and chr(code) not in '\\"[]-^'
    return chr(code) if plain else escape[0]


def _grammar_error(spec: GrammarSpec, problem: str) -> GrammarError:
    """What the library said of the spec as an error that says where."""
    problem = problem.strip()
    field = spec.field or "grammar"
    inner = _schema_at_fault(spec, problem)
    if inner is not None:
        alone = llguidance.LLMatcher.grammar_from_json_schema(inner.text)
        its_problem = llguidance.LLMatcher.validate_grammar(alone, None, limits=LIMITS)
        if its_problem:
            return _grammar_error(inner, its_problem)
    if spec.kind != "json_schema":
        return GrammarError(f"`{field}` cannot be used: {problem}", field)
    path, part = _innermost(json.loads(spec.text), problem, time.monotonic() + BLAME_S)
    if "coerce_one_of" in problem:
        why = "has parts that do not exclude each other, which cannot be enforced; `anyOf` can."
        return GrammarError(f"`{field}{path}`: `oneOf` {why}", field + path)
    unsupported = _UNSUPPORTED.search(problem)
    if unsupported is None:
        return GrammarError(f"`{field}` cannot be used: {problem} (at `{field}{path}`)", field + path)
    keys = [key for key in json.loads(f"[{unsupported[1]}]") if isinstance(key, str)]
    where = f"{field}{path}.{keys[0]}" if keys and keys[0] in part else field + path
    named = ", ".join(f"`{key}`" for key in keys)
    return GrammarError(f"`{where}`: the keyword {named} of JSON Schema cannot be enforced by this server.", where)


def _schema_at_fault(spec: GrammarSpec, problem: str) -> GrammarSpec | None:
    """The schema inside a grammar of ours that the library could not use; a comment before its rule has its field."""
    place = _FAULT_IN_SCHEMA.match(problem)
    if spec.kind != "lark" or place is None:
        return None
    lines = spec.text.split("\n")
    number = int(place[1]) - 1
    if not 0 < number < len(lines) or not lines[number - 1].startswith("// ") or "%json " not in lines[number]:
        return None
    schema = lines[number].split("%json ", 1)[1]
    return GrammarSpec(kind="json_schema", text=schema, field=lines[number - 1].removeprefix("// "))


def _innermost(schema: dict[str, Any], problem: str, deadline: float) -> tuple[str, dict[str, Any]]:
    """The path of the part at fault, and the part."""
    shared = {name: schema[name] for name in ("$defs", "definitions", "x-guidance") if name in schema}
    path, part = "", schema
    while True:
        for step, child in _children(part):
            if time.monotonic() > deadline:
                return path, part
            grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps({**shared, **child}))
            if llguidance.LLMatcher.validate_grammar(grammar, None, limits=LIMITS).strip() == problem:
                path, part = path + step, child
                break
        else:
            return path, part


def _children(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path from here, schema) of the schemas right inside this one."""
    for keyword, value in schema.items():
        if keyword in _SCHEMA_MAPS and isinstance(value, dict):
            yield from ((f".{keyword}.{name}", child) for name, child in value.items() if isinstance(child, dict))
        elif keyword in _SCHEMA_LISTS and isinstance(value, list):
            yield from ((f".{keyword}[{i}]", child) for i, child in enumerate(value) if isinstance(child, dict))
        elif keyword not in ("const", "enum", "default", "examples", "x-guidance") and isinstance(value, dict):
            yield f".{keyword}", value
