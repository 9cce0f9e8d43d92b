"""`[upstreams.NAME]` (or the seeds' `providers`), the `managed` upstream, and addresses as people write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import urlsplit, urlunsplit

from headrace.gateway.config_section import Section, shown
from headrace.gateway.snapshot import Dialect, Timeouts, Upstream

MANAGED_WORDS = ("managed", "taotoken-managed")
MANAGED = "managed"
"""The name of the upstream that the `[headrace]` section describes."""

ENDPOINTS = (
    "/chat/completions",
    "/completions",
    "/messages",
    "/responses",
    "/embeddings",
    "/rerank",
    "/tokenize",
    "/files",
    "/batches",
    "/models",
)
OPENAI_ONLY_HOSTS = ("api.openai.com", ".openai.azure.com", "api.anthropic.com")
"""Hosts that refuse a sampling field they do not know."""

_PLACEHOLDER = re.compile(r"\s|^\$\w+$|^%\w+%$|[{}<>]|\byour[-_ ]", re.IGNORECASE)
"""What stands where a key belongs, and is none: $KEY, %KEY%, {{key}}, <key>, your-key."""

UPSTREAM_KEYS = (
    "base_url",
    "urls",
    "api_key",
    "dialect",
    "timeout",
    "timeouts",
    "headers",
    "path_prefix",
    "chat_path",
    "health_path",
    "max_retries",
    "extended_sampling",
)


def read_upstream(section: Section, name: str, default_url: str | None = None) -> Upstream | None:
    """One upstream without its `models`; None when its address is missing or wrong.

    Several `urls` are equal replicas. `timeout` is the longest silence, before the first token and between tokens;
    `timeouts` sets each.
    """
    urls = _addresses(section, default_url)
    api_key = read_secret(section, "api_key")
    dialect: Dialect = "anthropic" if section.choice("dialect", ("openai", "anthropic")) == "anthropic" else "openai"
    timeouts = _timeouts(section)
    headers = read_headers(section)
    path_prefix, chat_path = _path(section, "path_prefix"), _path(section, "chat_path")
    health_path = _path(section, "health_path")
    retries = section.integer("max_retries", 0, 10)
    extended = section.flag("extended_sampling")
    if not urls:
        return None
    host = urlsplit(urls[0]).hostname or ""
    refuses_extensions = dialect == "anthropic" or any(host == h or host.endswith(h) for h in OPENAI_ONLY_HOSTS)
    return Upstream(
        name=name,
        base_url=urls[0],
        dialect=dialect,
        api_key=api_key,
        timeouts=timeouts,
        headers=headers,
        path_prefix=path_prefix,
        chat_path=chat_path,
        replicas=tuple(urls) if len(urls) > 1 else (),
        health_path=health_path,
        max_retries=2 if retries is None else retries,
        extended_sampling=not refuses_extensions if extended is None else extended,
    )


def read_secret(section: Section, name: str) -> str | None:
    """A key, never quoted in a message. Blanks and a `Bearer ` copied with it are removed."""
    value = section.text(name, secret=True)
    if value is None:
        return None
    value = value.strip("\"'").strip()
    if value.lower().startswith("bearer "):
        value = value[len("bearer ") :].strip()
    if not value.isprintable():
        section.complain(name, "holds a line break or another character that no header can carry.")
        return None
    if not value.isascii() or _PLACEHOLDER.search(value):
        section.warn(name, "holds characters that no key has; is it a placeholder still?")
    return value or None


def check_address(text: str) -> tuple[str, str | None]:
    """A base URL without trailing slash, and what was cut off it. ValueError says what is wrong with it.

    http://host:8000/v1/chat/completions is the address of an endpoint: the endpoint is cut off.
    """
    try:
        parts = urlsplit(text)
    except ValueError:
        raise ValueError("is not a URL such as http://127.0.0.1:8000/v1") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("is not a URL such as http://127.0.0.1:8000/v1")
    if any(letter.isspace() or not letter.isprintable() for letter in text):
        raise ValueError("holds a blank or a sign that nobody sees")
    try:
        _ = parts.port
    except ValueError:
        raise ValueError("has a port that is no number from 0 to 65535") from None
    if parts.username is not None or parts.password is not None:
        raise ValueError("holds a user or a password; put the key into api_key")
    if parts.fragment or parts.query:
        raise ValueError("has a query or a fragment (? or #); leave them out")
    path = parts.path.rstrip("/")
    cut = next((endpoint for endpoint in ENDPOINTS if path.endswith(endpoint)), None)
    if cut is not None:
        path = path.removesuffix(cut)
    return urlunsplit((parts.scheme, parts.netloc, path, "", "")), cut


def read_address(section: Section, name: str, text: str) -> str | None:
    try:
        url, cut = check_address(text)
    except ValueError as error:
        section.complain(name, f"is {shown(section.table[name])}: it {error}.")
        return None
    if cut is not None:
        section.warn(name, f"ends in {cut}, which is an endpoint; {url} is taken.")
    return url


def managed_upstream(section: Section | None, environment: Mapping[str, str]) -> Upstream | None:
    """The upstream of `[headrace]`: its address and key, each else of TAOTOKEN_BASE_URL and TAOTOKEN_API_KEY."""
    url = environment.get("TAOTOKEN_BASE_URL", "").strip() or None
    key = environment.get("TAOTOKEN_API_KEY", "").strip() or None
    if section is None:
        if url is None:
            return None
        try:
            return Upstream(name=MANAGED, base_url=check_address(url)[0], api_key=key)
        except ValueError:
            return None
    found = read_upstream(section, MANAGED, url or "")
    if found is None or found.api_key is not None or key is None:
        return found
    return replace(found, api_key=key)


def _addresses(section: Section, default_url: str | None) -> list[str]:
    one, many = section.text("base_url"), section.names("urls")
    if one is not None and many is not None:
        section.complain("urls", "and base_url are both given; list all replicas in urls, or keep base_url alone.")
        return []
    if one is None and many is None:
        if default_url:
            try:
                return [check_address(default_url)[0]]
            except ValueError as error:
                section.complain(None, f"takes TAOTOKEN_BASE_URL, which {error}.")
        elif default_url is None and "base_url" not in section and "urls" not in section:
            section.complain(None, 'has no base_url; give it an address such as base_url = "http://127.0.0.1:8000/v1".')
        return []
    if many == ():
        section.complain("urls", "is empty; list the addresses of the replicas, or write base_url.")
    if one is not None:
        found = [read_address(section, "base_url", one)]
    else:
        found = [read_address(section, "urls", url) for url in many or ()]
    return [url for url in found if url is not None]


def _timeouts(section: Section) -> Timeouts:
    silence = section.seconds("timeout")
    base = Timeouts()
    first, idle, total = base.first_token_s, base.idle_s, base.total_s
    if silence is not None:
        first = idle = silence
        total = max(total, silence)
    connect = base.connect_s
    each = section.section("timeouts")
    if each is not None:
        connect = each.seconds("connect") or connect
        first = each.seconds("first_token") or first
        idle = each.seconds("idle") or idle
        total = each.seconds("total") or total
        each.finish()
    return Timeouts(connect_s=connect, first_token_s=first, idle_s=idle, total_s=total)


def read_headers(section: Section) -> tuple[tuple[str, str], ...]:
    """`headers`: sent with every request."""
    table = section.section("headers")
    if table is None:
        return ()
    headers = []
    for name in table.table:
        value = table.text(name, secret=True)
        if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
            table.complain(name, "is not a header's name.")
        elif value is not None and (not value.isprintable() or not value.isascii()):
            table.complain(name, "has a value that no header can carry.")
        elif name.lower() in ("host", "content-length", "transfer-encoding", "connection"):
            table.complain(name, "is set for every request by itself and cannot be configured.")
        elif value is not None:
            headers.append((name, value))
    return tuple(headers)


def _path(section: Section, name: str) -> str | None:
    """A URL path; "" is allowed and means none."""
    if section.table.get(name) == "":
        section.raw(name)
        return ""
    value = section.text(name)
    if value is not None and ("://" in value or "?" in value or " " in value):
        section.complain(name, f"must be a path such as /v1beta/openai, but it is {shown(value)}.")
        return None
    return value
