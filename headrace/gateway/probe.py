"""Asking upstreams for their models, to see whether address, key and names are right. For `headrace gateway check`.

Plain urllib in a few threads: it needs no event loop and none of the gateway's clients. Proxies of the environment
are not used, as the gateway does not use them.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from headrace.gateway.snapshot import Snapshot, Upstream

TIMEOUT_S = 3.0
MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_SHOWN_MODELS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One replica's answer. `models` None: it gave no list, which many servers do not."""

    upstream: str
    url: str
    ok: bool
    text: str
    status: int | None = None
    seconds: float = 0.0
    models: tuple[str, ...] | None = None

    def as_json(self) -> dict[str, object]:
        return {
            "url": self.url,
            "ok": self.ok,
            "status": self.status,
            "seconds": round(self.seconds, 3),
            "models": None if self.models is None else list(self.models),
            "text": self.text,
        }


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """A key must not follow a redirect to another place."""
        return


def probe_all(snapshot: Snapshot, timeout_s: float = TIMEOUT_S) -> tuple[Probe, ...]:
    """Every replica of every upstream, in the snapshot's order, asked at the same time."""
    asked = [
        (upstream, replica) for upstream in snapshot.upstreams.values() for replica in range(len(upstream.base_urls))
    ]
    if not asked:
        return ()
    with ThreadPoolExecutor(min(16, len(asked))) as pool:
        return tuple(pool.map(lambda place: probe(snapshot, place[0], place[1], timeout_s), asked))


def probe(snapshot: Snapshot, upstream: Upstream, replica: int, timeout_s: float) -> Probe:
    url = upstream.url("/models", replica)
    headers = {"accept": "application/json", "user-agent": "headrace-check", **dict(upstream.headers)}
    if upstream.api_key is not None and upstream.api_key.isascii():
        if upstream.dialect == "anthropic":
            headers |= {"x-api-key": upstream.api_key, "anthropic-version": "2023-06-01"}
        else:
            headers["authorization"] = f"Bearer {upstream.api_key}"
    started = time.monotonic()
    status: int | None = None
    body = b""
    problem = ""
    try:
        opener = build_opener(ProxyHandler({}), _NoRedirect())
        with opener.open(Request(url, headers=headers), timeout=timeout_s) as response:
            status, body = response.status, response.read(MAX_BODY_BYTES)
    except HTTPError as error:
        status = error.code
        error.close()
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        problem = f"no answer within {timeout_s:g} s" if isinstance(reason, TimeoutError) else _spoken(reason)
    seconds = time.monotonic() - started
    models = _listed(body) if status == 200 else None
    ok, text = _verdict(snapshot, upstream, status, models, problem, seconds)
    return Probe(upstream=upstream.name, url=url, ok=ok, text=text, status=status, seconds=seconds, models=models)


def _verdict(
    snapshot: Snapshot,
    upstream: Upstream,
    status: int | None,
    models: tuple[str, ...] | None,
    problem: str,
    seconds: float,
) -> tuple[bool, str]:
    if status is None:
        return False, problem
    if status in (401, 403):
        said = "it needs an api_key" if upstream.api_key is None else "the api_key is not accepted"
        return False, f"{status}: {said}"
    if status == 200 and models is not None:
        wanted = [t.model for m in snapshot.models.values() for t in m.targets if t.upstream == upstream.name]
        missing = [name for name in dict.fromkeys(wanted) if name not in models]
        if missing and models:
            has = ", ".join(models[:MAX_SHOWN_MODELS]) + (" ..." if len(models) > MAX_SHOWN_MODELS else "")
            return False, f"does not list {', '.join(missing)}; it has {has}. Set upstream_model, or mend the name"
        return True, f"ok, {len(models)} models, {seconds * 1000:.0f} ms"
    if status in (404, 405):
        return True, f"answers, without a list of models ({status})"
    if 300 <= status < 400:
        return False, f"{status}: it redirects elsewhere; use the address it redirects to"
    if status == 200:
        return False, "200, but not a list of models: is this the right address?"
    return False, f"answers with status {status}"


def _listed(body: bytes) -> tuple[str, ...] | None:
    """The ids of a models answer, or None when it is something else."""
    try:
        entries = json.loads(body)["data"]
        return tuple(str(entry["id"]) for entry in entries)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _spoken(reason: object) -> str:
    if isinstance(reason, ConnectionRefusedError):
        return "connection refused: nothing listens there"
    if isinstance(reason, OSError) and reason.strerror:
        return f"not reachable: {reason.strerror}"
    return f"not reachable: {reason}"
