"""Routes for whoever runs the server: what it is, sleep and waking up, profiles, ending requests, the prefix cache.

They are open to holders of the API key. A server without one answers them only if it listens on this machine alone,
and then not to browser pages from elsewhere: whoever may ask a question must not be able to stop the others.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

import headrace
from headrace.config.rules import listens_beyond_loopback
from headrace.protocol import errors
from headrace.protocol.json import Body
from headrace.server.http import Exchange
from headrace.server.serving import Serving


class AbortFields(msgspec.Struct, frozen=True, kw_only=True):
    request_ids: list[str] | None = None
    """Ids of answers, or what was sent (or answered) as `x-request-id`."""
    all: bool | None = None


def check_admin(serving: Serving, exchange: Exchange) -> None:
    """Raises ApiError (403) where there is no key to tell who asks. With one it has been checked already."""
    settings = serving.settings
    if settings.api_keys:
        return
    if listens_beyond_loopback(settings.host):
        raise errors.admin_needs_key(exchange.path)
    origin = exchange.headers.get("origin")
    if origin is not None and not {origin, "*"} & set(settings.allowed_origins):
        raise errors.origin_not_allowed(origin)


async def server_info(serving: Serving, exchange: Exchange) -> None:
    await _check_asked(serving, exchange)
    client = serving.client
    settings = msgspec.to_builtins(serving.settings)
    settings["api_keys"] = f"{len(serving.settings.api_keys)} set"
    await exchange.answer_json(
        {
            "version": headrace.__version__,
            "state": client.state,
            "sleep_level": client.sleep_level,
            "num_restarts": client.num_restarts,
            "engine": client.info,
            "engine_settings": serving.engine_settings,
            "server_settings": settings,
            "default_sampling": serving.sampling_defaults,
            "last_step": client.last_stats,
        }
    )


async def sleep(serving: Serving, exchange: Exchange) -> None:
    await _check_asked(serving, exchange, "level", "mode")
    level = _choice(exchange, "level", "1", ("1", "2"))
    mode = _choice(exchange, "mode", "abort", ("abort", "wait"))
    await serving.client.sleep(1 if level == "1" else 2, abort=mode == "abort")
    await exchange.answer_json(_sleep_state(serving))


async def wake_up(serving: Serving, exchange: Exchange) -> None:
    await _check_asked(serving, exchange, "tags")
    if "tags" in exchange.query:
        raise errors.unsupported_field("tags", "Waking up brings back everything.")
    await serving.client.wake_up()
    await exchange.answer_json(_sleep_state(serving))


async def is_sleeping(serving: Serving, exchange: Exchange) -> None:
    await _check_asked(serving, exchange)
    await exchange.answer_json(_sleep_state(serving))


def _sleep_state(serving: Serving) -> dict[str, object]:
    client = serving.client
    return {"is_sleeping": client.state == "sleeping", "level": client.sleep_level}


async def reset_prefix_cache(serving: Serving, exchange: Exchange) -> None:
    await _check_asked(serving, exchange)
    await exchange.answer_json({"num_blocks": await serving.client.control("reset_prefix_cache")})


async def start_profile(serving: Serving, exchange: Exchange) -> None:
    await _check_asked(serving, exchange)
    _profiler_dir(serving).mkdir(parents=True, exist_ok=True)
    await serving.client.control("start_profile")
    await exchange.answer_json({"status": "profiling"})


async def stop_profile(serving: Serving, exchange: Exchange) -> None:
    await _check_asked(serving, exchange)
    name = f"headrace-core-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.prof"
    path = _profiler_dir(serving) / name
    await serving.client.control("stop_profile", str(path))
    await exchange.answer_json({"path": str(path), "read_with": f"python -m pstats {path}"})


def _profiler_dir(serving: Serving) -> Path:
    """Raises ApiError (400) where the server was not told where profiles may be written."""
    if serving.settings.profiler_dir is None:
        raise errors.not_enabled("Profiles are written only by a server that runs with --profiler-dir DIR.")
    return Path(serving.settings.profiler_dir).absolute()


async def abort_requests(serving: Serving, exchange: Exchange) -> None:
    _check_query(exchange)
    body = Body(await exchange.body(serving.settings.max_body_bytes))
    fields = body.read(AbortFields)
    exchange.warn_ignored(list(body.others()))
    if fields.all:
        if fields.request_ids is not None:
            raise errors.invalid_value("all", "`all` and `request_ids` exclude each other.")
        return await exchange.answer_json({"aborted": serving.client.abort_requests(None), "unknown": []})
    if fields.request_ids is None:
        raise errors.missing_field("request_ids", 'send the ids of the requests to end, or {"all": true}.')
    aborted: list[str] = []
    unknown: list[str] = []
    for name in fields.request_ids:
        found = serving.client.abort_requests(serving.answer_ids(name))
        aborted += found
        unknown += [] if found else [name]
    await exchange.answer_json({"aborted": aborted, "unknown": unknown})


async def _check_asked(serving: Serving, exchange: Exchange, *known: str) -> None:
    """Raises ApiError (400) for what the route would leave unheard: it takes `known` from the address, nothing else."""
    _check_query(exchange, *known)
    content = await exchange.body(serving.settings.max_body_bytes)
    for name in Body(content).others() if content.strip() else ():
        taken = f"POST {exchange.path}?{name}=... says it." if name in known else _takes(exchange, known)
        raise errors.invalid_value(name, f"`{name}` in the body would be ignored. {taken}")


def _check_query(exchange: Exchange, *known: str) -> None:
    for name in exchange.query:
        if name not in known:
            quoted = errors.quoted(name)
            raise errors.invalid_value(name, f"{quoted} in the address would be ignored. {_takes(exchange, known)}")


def _takes(exchange: Exchange, known: tuple[str, ...]) -> str:
    names = " and ".join(f"`{name}`" for name in known) or "nothing"
    return f"{exchange.path} takes {names} from the address."


def _choice(exchange: Exchange, name: str, default: str, allowed: tuple[str, ...]) -> str:
    value = exchange.query.get(name, default)
    if value not in allowed:
        raise errors.out_of_range(name, value, " or ".join(allowed))
    return value
