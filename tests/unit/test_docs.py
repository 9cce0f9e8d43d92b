"""The pages themselves: every block accounted for, no dead link, tables that match the code."""

from __future__ import annotations

import re

import msgspec

from headrace.protocol import access_errors, batches, errors
from headrace.protocol.openai_chat import ChatFields
from headrace.protocol.openai_completions import CompletionFields
from headrace.protocol.sampling import SamplingFields
from headrace.protocol.unbuilt_fields import UNBUILT
from headrace.server.routes import NOT_BUILT, ROUTES
from tests.documents import ROOT, blocks, relative_links


def test_every_command_in_the_pages_is_run_or_says_why_not() -> None:
    unmarked = [b.place for b in blocks() if b.language in ("bash", "sh", "python") and b.mark is None]
    assert unmarked == []


def test_python_in_the_pages_is_python() -> None:
    for block in blocks():
        if block.language == "python":
            compile(block.text, block.place, "exec")


def test_json_in_the_pages_is_json() -> None:
    for block in blocks():
        if block.language == "json":
            msgspec.json.decode(block.text.encode())


def test_links_between_pages_lead_somewhere() -> None:
    dead = [
        f"{page.relative_to(ROOT)} -> {target}"
        for page, target in relative_links()
        if not (page.parent / target).exists()
    ]
    assert dead == []


def test_the_quickstart_says_the_same_in_both_languages() -> None:
    english, chinese = ([b for b in blocks() if b.page == f"docs/quickstart{x}.md"] for x in ("", ".zh"))
    shape = [[(b.language, b.mark, len(b.text.splitlines())) for b in page] for page in (english, chinese)]
    assert shape[0] == shape[1]
    headings = [re.findall(r"^## (\d)\.", (ROOT / f"docs/quickstart{x}.md").read_text(), re.M) for x in ("", ".zh")]
    assert headings[0] == headings[1]


def documented_errors() -> dict[str, tuple[int, str]]:
    rows = re.findall(r"^\| (\d{3}) \| (\w+) \| `(\w+)` \|", (ROOT / "docs/errors.md").read_text(), re.M)
    return {code: (int(status), type) for status, type, code in rows}


def errors_in_code() -> dict[str, tuple[int, str]]:
    """One of each constructor of the error table."""
    made = [
        errors.invalid_http(),
        errors.invalid_json("x"),
        errors.duplicate_key("x"),
        errors.missing_field("x", "y"),
        errors.invalid_type("x", "y", "z"),
        errors.invalid_value("x", "y"),
        errors.unsupported_field("x"),
        errors.context_length_exceeded(limit=8, prompt_tokens=9, max_tokens=None, where="prompt"),
        errors.no_chat_template(),
        errors.chat_template_failed("x"),
        errors.missing_api_key(),
        errors.malformed_authorization("x"),
        errors.invalid_api_key(),
        access_errors.no_key("x"),
        access_errors.malformed_key("x", "y"),
        access_errors.unknown_key("x", "y"),
        access_errors.key_expired(0.0, "x"),
        access_errors.key_replaced(0.0, "x"),
        access_errors.key_revoked(0.0, "x"),
        access_errors.ip_not_allowed("x"),
        access_errors.model_not_allowed("x", "y", "z"),
        access_errors.rate_limit_exceeded("x", 1.0, {}),
        access_errors.concurrency_exceeded("x", {}),
        access_errors.insufficient_quota("x", None, {}),
        errors.origin_not_allowed("x"),
        errors.model_not_found("x", ["y"]),
        errors.response_not_found("resp_1"),
        batches.file_not_found("file-1"),
        batches.batch_not_found("batch_1"),
        batches.file_in_use("file-1", "batch_1"),
        batches.file_too_large(1),
        batches.storage_full(1),
        batches.storage_failed("x"),
        batches.malformed_form("x"),
        errors.unknown_endpoint("GET", "/x", ["/y"]),
        errors.method_not_allowed("GET", "/x", ["POST"]),
        errors.request_timeout(1),
        errors.request_too_large(1),
        errors.head_too_large(1),
        errors.url_too_long(1),
        errors.unsupported_encoding("gzip"),
        errors.broken_body(),
        errors.queue_full("x"),
        errors.conflict("x"),
        errors.not_enabled("x"),
        errors.admin_needs_key("/x"),
        errors.internal_error("x"),
        errors.engine_error("x"),
        errors.failed("grammar_dead_end", "x"),
        errors.refused("invalid_grammar", "x", "y"),
        errors.request_kills_engine(2),
        errors.not_implemented("/x", "y"),
        errors.wrong_for_model("x"),
        errors.too_many_sequences("n", 1, 9, running=1, waiting=1),
        errors.too_many_queued_tokens(9, 1),
    ]
    return {str(e.code): (e.status, e.type) for e in made}


def unavailable_codes() -> set[str]:
    sources = [path.read_text() for path in (ROOT / "headrace" / "server").glob("*.py")]
    return {code for source in sources for code in re.findall(r"""unavailable\(\s*"(\w+)\"""", source)}


def test_the_error_page_is_the_error_table() -> None:
    unavailable = dict.fromkeys(unavailable_codes(), (503, "server_error"))
    assert documented_errors() == {**errors_in_code(), **unavailable}


def test_the_routes_that_are_said_not_to_be_built_are_those_that_are_not() -> None:
    text = re.sub(r"\s+", " ", (ROOT / "docs" / "api.md").read_text())
    (listed,) = re.findall(r"answer 501 `not_implemented`: (.*?)\. ##", text)
    assert sorted(listed.split(", ")) == sorted(set(NOT_BUILT.values()))


def test_every_error_code_in_the_source_is_on_the_error_page() -> None:
    used = set()
    for folder in ("protocol", "server"):
        for path in (ROOT / "headrace" / folder).glob("*.py"):
            used |= set(re.findall(r"""\bcode="(\w+)\"""", path.read_text()))
    assert used - set(documented_errors()) == set()


def test_every_error_code_of_the_gateway_is_on_the_error_page() -> None:
    page = (ROOT / "docs/errors.md").read_text()
    used = set()
    for path in (ROOT / "headrace" / "gateway").glob("*.py"):
        used |= set(re.findall(r"""(?:\bcode=|_upstream_error\(\d+, )"(\w+)\"""", path.read_text()))
    assert {code for code in used if f"`{code}`" not in page} == set()
    assert {"no_healthy_upstream", "plan_not_found", "upstream_rate_limited"} <= used


def api_page() -> str:
    return (ROOT / "docs/api.md").read_text()


def test_the_api_page_lists_every_route_and_no_other() -> None:
    documented = set(re.findall(r"`(GET|POST|DELETE) (/[^`]*)`", api_page()))
    assert documented == {(route.method, route.path) for route in ROUTES}


def test_the_api_page_names_every_parameter() -> None:
    table = re.search(r"^\| parameter .*?(?=^A field that)", api_page(), re.M | re.S)
    assert table is not None
    named = set()
    for line in table[0].splitlines():
        first_cell = line.split("|")[1] if line.startswith("|") else line
        named |= set(re.findall(r"`([a-z_]+)`", first_cell))
    fields = {f.name for t in (ChatFields, CompletionFields, SamplingFields) for f in msgspec.structs.fields(t)}
    assert fields - named == set()


def test_what_the_api_page_calls_unsupported_is_refused() -> None:
    start = api_page().index("## Not supported yet")
    section = api_page()[start : api_page().index("## A stream")]
    names = set(re.findall(r"`([a-z_]+)`", section)) - {"unsupported_parameter", "not_implemented"}
    assert names - set(UNBUILT) == set()
