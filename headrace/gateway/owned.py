"""Files, batches and stored responses: they live at the upstream that made them.

The id that a client gets names that upstream, so any worker finds it again without a table:

    upstream "cloud" answers {"id": "file-abc", ...}    the client gets {"id": "file-abc~Y2xvdWQ", ...}

Where no id says so, the upstream is the one of the request's `model` (a form field or ?model=), or of the model that
the first line of a batch's file asks for, else the default one.
Files and batches are seen by the key that made them only; a stored response is found by whoever knows its id, which
is a secret in itself.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from typing import Any
from urllib.parse import parse_qsl, urlencode

import msgspec

from headrace.gateway import batch_file, headers, upstream_errors
from headrace.gateway.body import Fields
from headrace.gateway.exchange import Exchange
from headrace.gateway.forward import check_model, plan_of
from headrace.gateway.keys import KeyRecord
from headrace.gateway.owners import Owner
from headrace.gateway.paths import Place
from headrace.gateway.route import decide, default_model
from headrace.gateway.rules import RequestFacts
from headrace.gateway.snapshot import Plan, Snapshot, Upstream
from headrace.gateway.state import GatewayState
from headrace.gateway.upstream_client import BrokenAnswer, UpstreamAnswer
from headrace.gateway.upstream_errors import UpstreamFailure
from headrace.protocol.errors import ApiError

_OWNED = re.compile(r"(?P<id>.+)~(?P<owner>[A-Za-z0-9_-]+)")
_ID_FIELDS = ("id", "input_file_id", "output_file_id", "error_file_id", "first_id", "last_id")
_MADE_FIELDS = ("id", "output_file_id", "error_file_id")
"""What an answer about one object of a key's names besides what it was given."""
MAX_PAGES = 50
"""Of an upstream's list, looked through for something of a key's."""
_SAFE_ID = re.compile(r"[A-Za-z0-9._:=@+-]{1,200}")
_JSON = "application/json"


def owned_id(id: str, upstream: str) -> str:
    """The id that clients get for `id` of an upstream."""
    return f"{id}~{base64.urlsafe_b64encode(upstream.encode()).decode().rstrip('=')}"


def split_id(id: str) -> tuple[str, str | None]:
    """The id at its upstream, and the upstream's name; None for an id that names none."""
    match = _OWNED.fullmatch(id)
    if match is None:
        return id, None
    try:
        owner = base64.urlsafe_b64decode(match["owner"] + "=" * (-len(match["owner"]) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        return id, None
    return match["id"], owner


async def files(state: GatewayState, snapshot: Snapshot, exchange: Exchange, place: Place, record: KeyRecord) -> None:
    """POST and GET /files, GET and DELETE /files/{id}, GET /files/{id}/content."""
    body = await exchange.body(snapshot.listen.max_body_bytes) if exchange.method == "POST" else None
    path, owner = _path(place)
    model = _query(exchange).get("model")
    content_type = exchange.headers.get(b"content-type", b"")
    first_line: str | None = None
    is_batch = body is not None and batch_file.is_batch(body, content_type)
    if body is not None:
        model = batch_file.form_text(body, content_type, "model") or model
        first_line = batch_file.first_model(body, content_type) if is_batch and model is None else None
    try:
        upstream = _upstream(state, snapshot, record, owner, model or first_line)
    except ApiError as error:
        if first_line is None:
            raise
        message = f"{error.message} The first line of the file asks for it."
        raise ApiError(error.status, message, type=error.type, code=error.code, param="file") from None
    if body is not None and is_batch:
        _check_has_batches(upstream)
        names = batch_file.names_at(snapshot, upstream.name)
        if names:
            body = await asyncio.to_thread(batch_file.renamed, body, content_type, names)
    await _pass_owned(state, exchange, record, place, upstream, path, body, content_type or None)


async def batches(state: GatewayState, snapshot: Snapshot, exchange: Exchange, place: Place, record: KeyRecord) -> None:
    """POST and GET /batches, GET /batches/{id}, POST /batches/{id}/cancel."""
    body = await exchange.body(snapshot.listen.max_body_bytes) if exchange.method == "POST" else None
    path, owner = _path(place)
    plain: str | None = None
    if exchange.method == "POST" and place.id is None:
        _check_batch_allowed(record, plan_of(snapshot, record))
        fields = Fields(body or b"")
        file_id = fields.value("input_file_id") if "input_file_id" in fields else None
        if isinstance(file_id, str):
            plain, owner = split_id(file_id)
            body = fields.changed({"input_file_id": plain})
    upstream = _upstream(state, snapshot, record, owner, _query(exchange).get("model"))
    _check_has_batches(upstream)
    if plain is not None:
        await _owner(state, record, upstream).check(plain)
    await _pass_owned(state, exchange, record, place, upstream, path, body, _JSON.encode() if body else None)


def _check_has_batches(upstream: Upstream) -> None:
    if upstream.dialect == "anthropic":
        message = f"The upstream {upstream.name} speaks Anthropic's Messages API, which has no batches of this form."
        raise ApiError(400, message, code="unsupported_endpoint")


def _check_batch_allowed(record: KeyRecord, plan: Plan | None) -> None:
    """Raises ApiError 403 for a key whose limits a batch would get round: nobody here sees its requests."""
    limits = [record.limits, *([plan.limits] if plan is not None else [])]
    if record.models or (plan is not None and plan.models):
        bound = "certain models"
    elif any(each.budget_micros is not None or each.tpm is not None for each in limits):
        bound = "a budget or a number of tokens"
    else:
        return
    message = (
        f"This API key is limited to {bound}, and the requests of a batch run at its upstream, where this gateway "
        "cannot hold them to that. Send them one by one, or ask for a key without such a limit."
    )
    raise ApiError(403, message, type="permission_error", code="batch_not_allowed")


async def stored_response(
    state: GatewayState, snapshot: Snapshot, exchange: Exchange, place: Place, record: KeyRecord
) -> None:
    """GET, DELETE, cancel and input items of a response. Its id is the upstream's own, so those that may have it, and
    their replicas, are asked one after the other."""
    body = await exchange.body(snapshot.listen.max_body_bytes) if exchange.method == "POST" else None
    path, owner = _path(place)
    first = _upstream(state, snapshot, record, owner, _query(exchange).get("model"))
    others = [u for u in _reachable(state, snapshot, record) if u.dialect == "openai" and u.name != first.name]
    failures: list[ApiError] = []
    candidates = [first] if owner is not None else [first, *others]
    for upstream, replica in [(u, replica) for u in candidates for replica in range(len(u.base_urls))]:
        content_type = _JSON.encode() if body else None
        try:
            return await _pass(state, exchange, upstream, path, body, content_type, replica=replica)
        except ApiError as error:
            if error.status not in (400, 404, 502) or exchange.status is not None:
                raise
            failures.append(error)
    # Where nobody could be asked, it may be; where nobody keeps responses, it is not.
    raise min(failures, key=lambda error: (error.code == "upstream_invalid_response", error.status == 404))


def _path(place: Place) -> tuple[str, str | None]:
    """The upstream's path, and the owner that the id names."""
    if place.id is None:
        return place.endpoint.path, None
    plain, owner = split_id(place.id)
    if not _SAFE_ID.fullmatch(plain) or set(plain) == {"."}:
        raise ApiError(404, f"There is no {place.id[:80]} here.", code="not_found", param="id")
    return place.endpoint.path.replace("{id}", plain), owner


def _query(exchange: Exchange) -> dict[str, str]:
    return dict(parse_qsl(exchange.query.decode("latin-1")))


def _reachable(state: GatewayState, snapshot: Snapshot, record: KeyRecord) -> list[Upstream]:
    """Upstreams that serve at least one model that the key may use, the default one first."""
    plan = plan_of(snapshot, record)
    found: dict[str, Upstream] = {}
    default = snapshot.upstreams.get(snapshot.default_upstream or "")
    if default is not None:
        found[default.name] = default
    for name, model in snapshot.models.items():
        try:
            state.keys.check_model(record, plan, name)
        except ApiError:
            continue
        for target in model.targets:
            found.setdefault(target.upstream, snapshot.upstreams[target.upstream])
    return list(found.values())


def _upstream(
    state: GatewayState, snapshot: Snapshot, record: KeyRecord, owner: str | None, model: str | None
) -> Upstream:
    """Where the request goes. Raises ApiError 404 for an owner that is gone or that the key does not reach."""
    reachable = _reachable(state, snapshot, record)
    if owner is not None:
        for upstream in reachable:
            if upstream.name == owner:
                return upstream
        raise ApiError(404, "The upstream that this id belongs to is no longer here.", code="not_found", param="id")
    name = model or default_model(snapshot)
    if name is not None:
        facts = RequestFacts(endpoint="files", model=name, key_name=record.name, key_tags=record.tags)
        route = decide(snapshot, facts)
        check_model(state, record, plan_of(snapshot, record), name, route)
        return route.attempts[0].upstream
    if not reachable:
        raise ApiError(404, "This key may use no model, so there is no upstream for this.", code="not_found")
    return reachable[0]


def _owner(state: GatewayState, record: KeyRecord, upstream: Upstream) -> Owner:
    return Owner(state.keys.store.database, record.id, upstream.name)


async def _pass_owned(
    state: GatewayState,
    exchange: Exchange,
    record: KeyRecord,
    place: Place,
    upstream: Upstream,
    path: str,
    body: bytes | None,
    content_type: bytes | None,
) -> None:
    """A request about what one key has made. Raises ApiError."""
    owner = _owner(state, record, upstream)
    if place.id is not None:
        await owner.check(split_id(place.id)[0])
    await _pass(state, exchange, upstream, path, body, content_type, owner)


async def _pass(
    state: GatewayState,
    exchange: Exchange,
    upstream: Upstream,
    path: str,
    body: bytes | None,
    content_type: bytes | None,
    owner: Owner | None = None,
    *,
    replica: int = 0,
) -> None:
    """One request as it is. With an owner, ids in a JSON answer get their upstream, and lists hold what is the
    owner's: as many pages are asked for as it takes to find some. Raises ApiError."""
    sent = headers.forwarded(
        exchange.raw_headers, exchange.request_id, dialect=upstream.dialect, content_type=content_type
    )
    pairs = [(n, v) for n, v in parse_qsl(exchange.query.decode("latin-1"), keep_blank_values=True) if n != "model"]
    query = [(n, split_id(v)[0] if n in ("after", "before") else v) for n, v in pairs]
    method = "GET" if exchange.method == "HEAD" else exchange.method
    others = [pair for pair in exchange.answer_headers if pair[0] != b"x-gateway-upstream"]
    exchange.answer_headers = [*others, (b"x-gateway-upstream", upstream.name.encode("ascii", "replace"))]
    with exchange.leaving():
        try:
            async with asyncio.timeout(upstream.timeouts.total_s):
                for _ in range(MAX_PAGES):
                    url = upstream.url(path, replica) + (f"?{urlencode(query)}" if query else "")
                    answer = await state.clients.of(upstream).send(method, url, sent, body)
                    try:
                        after = await _relay(exchange, upstream, answer, owner)
                    finally:
                        answer.close()
                    if after is None:
                        return
                    query = [*[pair for pair in query if pair[0] != "after"], ("after", after)]
        except UpstreamFailure as failure:
            raise failure.error from None
        except TimeoutError:
            raise upstream_errors.timed_out(upstream, "total", upstream.timeouts.total_s).error from None
    await exchange.answer(200, b'{"object":"list","data":[],"has_more":false}')


async def _relay(exchange: Exchange, upstream: Upstream, answer: UpstreamAnswer, owner: Owner | None) -> str | None:
    """Answers with it; or returns where the next page begins, when this one has nothing of the owner's."""
    if not 200 <= answer.status < 300:
        body = await answer.read_error()
        raise upstream_errors.from_status(upstream, answer.status, answer.headers, body)
    passed = [*headers.to_client(answer.raw_headers), *headers.ignored(answer.headers)]
    if answer.content_type == "text/html":
        raise upstream_errors.invalid_response(upstream, "an HTML page came with status 200")
    try:
        if answer.content_type == _JSON and exchange.path.rstrip("/").rpartition("/")[2] != "content":
            body = await answer.read_whole()
            if owner is not None:
                value = _decoded(body)
                if value is not None:
                    after = await _claim(value, owner)
                    if after is not None:
                        return after
                    _rename(value, upstream.name)
                    body = msgspec.json.encode(value)
            await exchange.answer(answer.status, body, passed)
            return None
        data = await answer.read()
        await exchange.stream(answer.status, passed, events=False)
        while data:
            await exchange.write(data)
            data = await answer.read()
        await exchange.end()
        return None
    except BrokenAnswer:
        raise upstream_errors.truncated(upstream) from None


def _decoded(body: bytes) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return None
    return value if isinstance(value, dict) else None


async def _claim(value: dict[str, Any], owner: Owner) -> str | None:
    """What a single answer names is the owner's from now on; of a list what is not is taken out.

    Returns where the next page begins when the whole page was others'.
    """
    data = value.get("data")
    if not isinstance(data, list):
        await owner.made([value[name] for name in _MADE_FIELDS if isinstance(value.get(name), str) and value[name]])
        return None
    own = await owner.own([item["id"] for item in data if isinstance(item, dict) and isinstance(item.get("id"), str)])
    kept = value["data"] = [item for item in data if isinstance(item, dict) and item.get("id") in own]
    after = value.get("last_id") or (data[-1].get("id") if data and isinstance(data[-1], dict) else None)
    if not kept and value.get("has_more") and isinstance(after, str):
        return after
    for name, item in (("first_id", kept[:1]), ("last_id", kept[-1:])):
        if name in value:
            value[name] = item[0]["id"] if item else None
    return None


def _rename(value: Any, upstream: str) -> None:
    if not isinstance(value, dict):
        return
    for name in _ID_FIELDS:
        if isinstance(value.get(name), str) and value[name]:
            value[name] = owned_id(value[name], upstream)
    if isinstance(value.get("data"), list):
        for item in value["data"]:
            _rename(item, upstream)
