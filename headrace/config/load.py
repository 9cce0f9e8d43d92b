"""From a command line to the settings that the processes are given, or to all the reasons why not.

    words ─ parse ─► Given ─► EngineSettings, ServerSettings ─ rules ─► model files ─ model rules ─► Launch

Nothing is loaded: of the model only its headers are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import msgspec

from headrace.config import rules
from headrace.config.command_line import Given, parse_command_line
from headrace.config.errors import ConfigError
from headrace.config.json_style import JSON_STYLE_FLAGS, json_style
from headrace.config.model_files import ModelFiles, open_model
from headrace.config.purpose import find_pooler
from headrace.config.resolve import BUNDLED_NAME, is_local, resolve_model
from headrace.config.settings import EngineSettings, ServerSettings


@dataclass(frozen=True)
class Launch:
    """A checked start. `notices` are lines for the person: what flags map to, and advice."""

    engine: EngineSettings
    server: ServerSettings
    files: ModelFiles
    notices: tuple[str, ...]


class LaunchError(ConfigError):
    """Every mistake of a command, one line each; the message is all of them."""

    def __init__(self, errors: Sequence[str], notices: Sequence[str] = ()) -> None:
        super().__init__("\n".join(errors))
        self.errors = tuple(errors)
        self.notices = tuple(notices)


def load(words: Sequence[str]) -> Launch:
    """Check a command line and the files it names. Raises LaunchError with every mistake."""
    return load_given(parse_command_line(words))


def load_given(given: Given) -> Launch:
    """The same, from a command line that has been parsed already."""
    errors = [*given.errors, *given.refusals()]
    notices = given.notices()
    name = _model_name(given, errors)
    engine, server = _settings(given, name, errors)
    setup = rules.Setup(engine, server, frozenset(given.values), str(given.value("load-format")))
    _sort(rules.findings(setup), errors, notices)

    files: ModelFiles | None = None
    with _collected(errors):
        path = resolve_model(name, _text(given, "revision"), _text(given, "download-dir"))
        for flag in ("revision", "download-dir"):
            if flag in given.values and is_local(name):
                notices.append(f"{given.spelled[flag]} has no effect: the model is on this machine, not from the hub.")
        files = open_model(path, engine.hf_overrides)
        engine = msgspec.structs.replace(engine, model=str(path))
        with _collected(errors):
            engine = _with_purpose(engine, given, files)
        if engine.pooler is not None and (prompt := files.pooling.default_prompt) is not None:
            notices.append(
                f"The model's files have a prompt for every text, {prompt!r}. The server adds none: clients send it."
            )
        facts = rules.ModelFacts(
            files.config, "gguf" if files.kind == "gguf" else "safetensors", files.chat_template is not None
        )
        setup = dataclasses.replace(setup, engine=engine)
        _sort(rules.model_findings(setup, facts), errors, notices)
    if errors or files is None:
        raise LaunchError(list(dict.fromkeys(errors)), notices)
    return Launch(engine, server, files, tuple(notices))


def _with_purpose(engine: EngineSettings, given: Given, files: ModelFiles) -> EngineSettings:
    """The settings with what the model is served for, and the longest text as its files have it. Raises ConfigError."""
    pooler = find_pooler(
        files,
        task=str(given.value("task")),
        runner=str(given.value("runner")),
        convert=str(given.value("convert")),
        changes=cast("dict[str, object] | None", given.value("override-pooler-config")) or {},
    )
    if pooler is None:
        return engine
    length = engine.max_model_len
    if length is None and files.pooling.max_length is not None:
        length = min(files.pooling.max_length, files.config.max_position_embeddings)
    return msgspec.structs.replace(engine, pooler=pooler, max_model_len=length)


def settings(given: Given) -> tuple[EngineSettings, ServerSettings]:
    """The settings that flags alone decide; `model` is still as the person wrote it. Raises LaunchError."""
    errors = [*given.errors, *given.refusals()]
    name = _model_name(given, errors)
    result = _settings(given, name, errors)
    if errors:
        raise LaunchError(errors, given.notices())
    return result


def _model_name(given: Given, errors: list[str]) -> str | None:
    flag = _text(given, "model")
    if given.positional is not None and flag is not None and given.positional != flag:
        errors.append(f"two models are named, {given.positional} and --model {flag}: name one.")
    return given.positional if given.positional is not None else flag


def _settings(given: Given, name: str | None, errors: list[str]) -> tuple[EngineSettings, ServerSettings]:
    model = name if name is not None else BUNDLED_NAME
    value = given.value
    length = value("max-model-len")
    target_ms = cast("float | None", value("step-time-target-ms"))
    swap_gib = cast("float | None", value("swap-space"))
    overrides = dict(cast("dict[str, object] | None", value("hf-overrides")) or {})
    for flag, key in (("rope-scaling", "rope_scaling"), ("rope-theta", "rope_theta")):
        if flag in given.values:
            overrides.setdefault(key, given.values[flag])

    tokenizer, template = _text(given, "tokenizer"), _text(given, "chat-template")
    with _collected(errors):
        tokenizer = _tokenizer_path(tokenizer)
    with _collected(errors):
        template = _template_text(template)
    generation = str(value("generation-config"))
    with _collected(errors):
        generation = _generation_config(generation)

    compact, closed = (bool(value(f"guided-decoding-{name}")) for name in JSON_STYLE_FLAGS)
    with _collected(errors):
        style = json_style(cast("dict[str, object] | None", value("structured-outputs-config")) or {})
        compact, closed = compact or style[0], closed or style[1]

    engine = EngineSettings(
        model=model,
        tokenizer=tokenizer,
        device=cast('Literal["auto", "cpu", "cuda"]', value("device")),
        dtype=cast('Literal["auto", "float32", "float16", "bfloat16"]', value("dtype")),
        kernels=cast('Literal["auto", "native", "reference"]', value("kernels")),
        kv_cache_dtype=str(value("kv-cache-dtype")),
        quantization=_text(given, "quantization"),
        hf_overrides=overrides,
        max_model_len=None if length == "auto" else cast(int, length),
        max_num_seqs=cast(int, value("max-num-seqs")),
        max_num_batched_tokens=cast("int | None", value("max-num-batched-tokens")),
        gpu_memory_utilization=cast(float, value("gpu-memory-utilization")),
        kv_cache_memory_bytes=cast("int | None", value("kv-cache-memory-bytes")),
        block_size=cast("int | None", value("block-size")),
        swap_space_bytes=None if swap_gib is None else int(swap_gib * (1 << 30)),
        enable_prefix_caching=bool(value("enable-prefix-caching")),
        enable_chunked_prefill=bool(value("enable-chunked-prefill")),
        scheduling_policy=cast('Literal["fcfs", "priority"]', value("scheduling-policy")),
        max_num_queued_reqs=cast(int, value("max-num-queued-reqs")),
        max_num_queued_tokens=cast("int | None", value("max-num-queued-tokens")),
        step_time_target_s=None if target_ms is None else target_ms / 1000,
        step_timeout_s=cast("float | None", value("step-timeout")),
        seed=cast("int | None", value("seed")),
        threads=cast("int | None", value("threads")),
        trace_steps=bool(value("trace-steps")),
    )
    server = ServerSettings(
        host=str(value("host")),
        port=cast(int, value("port")),
        api_keys=_texts(given, "api-key"),
        served_model_names=_texts(given, "served-model-name") or (model,),
        model_path=model,
        chat_template=template,
        tool_call_parser=str(value("tool-call-parser")),
        reasoning_parser=str(value("reasoning-parser")),
        compact_json=compact,
        closed_json_objects=closed,
        generation_config=generation,
        override_generation_config=cast("dict[str, object] | None", value("override-generation-config")) or {},
        uvicorn_log_level=str(value("uvicorn-log-level")),
        allowed_origins=_texts(given, "allowed-origins"),
        allowed_methods=_texts(given, "allowed-methods"),
        allowed_headers=_texts(given, "allowed-headers"),
        ssl_keyfile=_text(given, "ssl-keyfile"),
        ssl_certfile=_text(given, "ssl-certfile"),
        root_path=str(value("root-path")),
        log_requests=bool(value("enable-log-requests")),
        log_stats=not value("disable-log-stats"),
        max_log_len=cast("int | None", value("max-log-len")),
        max_logprobs=cast(int, value("max-logprobs")),
        force_include_usage=bool(value("enable-force-include-usage")),
        serve_docs=not value("disable-fastapi-docs"),
        trust_request_chat_template=bool(value("trust-request-chat-template")),
        profiler_dir=_text(given, "profiler-dir"),
        batch_dir=_text(given, "batch-dir"),
        batch_concurrency=cast("int | None", value("batch-concurrency")),
        batch_file_limit_bytes=cast(int, value("batch-file-limit")),
        batch_storage_limit_bytes=cast(int, value("batch-storage-limit")),
        shutdown_timeout_s=cast(float, value("shutdown-timeout")),
    )
    return engine, server


def _text(given: Given, name: str) -> str | None:
    return cast("str | None", given.value(name))


def _texts(given: Given, name: str) -> tuple[str, ...]:
    return tuple(cast("Sequence[str] | None", given.value(name)) or ())


def _tokenizer_path(name: str | None) -> str | None:
    if name is None:
        return None
    path = Path(name).expanduser()
    if not path.exists():
        raise ConfigError(f"--tokenizer {name}: there is no such directory or file; a hub id is not looked up here.")
    return str(path.absolute())


def _template_text(template: str | None) -> str | None:
    """The text of a template file, or the text itself when it is Jinja."""
    if template is None:
        return None
    if "{{" in template or "{%" in template or "\n" in template:
        return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--chat-template {template}: neither a readable file ({reason}) nor Jinja text.") from None


def _generation_config(choice: str) -> str:
    """auto, model, none, or an existing directory. `vllm` is that server's word for none."""
    if choice in ("auto", "model", "none"):
        return choice
    if choice in ("vllm", "headrace"):
        return "none"
    path = Path(choice).expanduser()
    if path.is_file() or (path / "generation_config.json").is_file():
        return str(path.absolute())
    raise ConfigError(
        f"--generation-config {choice}: say auto, none, or a directory that holds generation_config.json."
    )


def _sort(found: Sequence[rules.Finding], errors: list[str], notices: list[str]) -> None:
    for finding in found:
        (errors if finding.severity == "error" else notices).append(finding.message)


@contextlib.contextmanager
def _collected(errors: list[str]) -> Iterator[None]:
    """A refusal inside becomes a line in `errors`, so that the checks after it still run."""
    try:
        yield
    except ConfigError as error:
        errors.append(str(error))
