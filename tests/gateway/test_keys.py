"""Keys: what they look like, who is let in, what a refusal says, and how fast a revocation is seen."""

from __future__ import annotations

import hmac
import logging
import multiprocessing
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from headrace.gateway import key_index, key_secrets
from headrace.gateway.key_index import KeyIndex
from headrace.gateway.key_secrets import new_secret
from headrace.gateway.keys import KeyChanges, KeyMistake, KeyRequest, KeyStore
from headrace.gateway.ledger import open_ledger, open_store
from headrace.gateway.snapshot import Limits, Plan
from headrace.gateway.usage import UsageEvent
from headrace.protocol.errors import ApiError

DAY_S = 86_400.0


class Clock:
    """Time that a test sets: 2026-11-29 12:00 UTC."""

    def __init__(self) -> None:
        self.now_s = 1_795_953_600.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[KeyStore]:
    store = open_store(None, tmp_path / "data")
    store.now_s = clock
    yield store
    store.database.close()


@pytest.fixture
def index(store: KeyStore, clock: Clock) -> KeyIndex:
    return KeyIndex(store, now_s=clock)


def made(store: KeyStore, index: KeyIndex, name: str = "vllm-local-dev", **rights: object) -> str:
    _, secret = store.create(KeyRequest(name=name, **rights))  # type: ignore[arg-type]
    index.reload()
    return secret


def bearer(secret: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {secret}".encode()}


def refusal(index: KeyIndex, headers: dict[bytes, bytes], ip: str | None = "127.0.0.1") -> tuple[int, str, str]:
    with pytest.raises(ApiError) as caught:
        index.authenticate(headers, ip)
    return caught.value.status, str(caught.value.code), caught.value.message


def test_a_secret_is_a_prefix_and_256_random_bits() -> None:
    secrets = {new_secret() for _ in range(1000)}
    assert len(secrets) == 1000
    assert all(re.fullmatch(r"sk-hr-[0-9A-Za-z]{43}", secret) for secret in secrets)


@pytest.mark.parametrize("header", [b"x-api-key", b"api-key", b"x-goog-api-key"])
def test_a_key_is_taken_from_any_header_that_clients_use(store: KeyStore, index: KeyIndex, header: bytes) -> None:
    secret = made(store, index)
    assert index.authenticate({header: secret.encode()}, None).name == "vllm-local-dev"


@pytest.mark.parametrize(
    "form",
    [
        "Bearer {}",
        "bearer {}",
        "  Bearer   {}  ",
        "Bearer {}\r\n",
        'Bearer "{}"',
        "Bearer '{}'",
        '"Bearer {}"',
        "Bearer Bearer {}",
        "Bearer\t{}",
        "Bearer `{}`",
    ],
)
def test_what_copying_does_to_a_key_is_forgiven(store: KeyStore, index: KeyIndex, form: str) -> None:
    secret = made(store, index)
    assert index.authenticate({b"authorization": form.format(secret).encode()}, None).name == "vllm-local-dev"


def test_the_same_key_in_several_headers_is_one_key(
    store: KeyStore, index: KeyIndex, caplog: pytest.LogCaptureFixture
) -> None:
    secret = made(store, index)
    index.authenticate({**bearer(secret), b"x-api-key": secret.encode(), b"api-key": secret.encode()}, None)
    assert caplog.records == []


def test_of_different_keys_bearer_wins_with_a_warning_that_has_neither(
    store: KeyStore, index: KeyIndex, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = made(store, index, "first"), made(store, index, "second")
    assert index.authenticate({**bearer(first), b"x-api-key": second.encode()}, None).name == "first"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert first not in record.getMessage() and second not in record.getMessage()


def test_a_proxys_basic_authorization_beside_a_key_is_not_in_the_way(store: KeyStore, index: KeyIndex) -> None:
    secret = made(store, index)
    headers = {b"authorization": b"Basic dXNlcjpwYXNz", b"x-api-key": secret.encode()}
    assert index.authenticate(headers, None).name == "vllm-local-dev"


@pytest.mark.parametrize(
    ("headers", "code", "says"),
    [
        ({}, "missing_api_key", "No API key was sent"),
        ({b"authorization": b""}, "missing_api_key", "No API key was sent"),
        ({b"authorization": b"Bearer "}, "malformed_authorization", "no key follows `Bearer`"),
        ({b"authorization": b"Bearersk-hr-abc"}, "malformed_authorization", "the space after `Bearer` is missing"),
        ({b"authorization": b"Bearer: sk-hr-abc"}, "malformed_authorization", "and nothing else"),
        ({b"authorization": b"Token sk-hr-abc"}, "malformed_authorization", "its scheme is not `Bearer`"),
        ({b"authorization": b"sk-hr-abc"}, "malformed_authorization", "lacks the word `Bearer`"),
        ({b"authorization": b"Bearer sk-hr-abc"}, "invalid_api_key", "It has 9 characters where 49 are right"),
        ({b"authorization": b"Bearer sk-proj-1"}, "invalid_api_key", "keys begin with sk-hr-"),
        ({b"authorization": b"Bearer ${KEY}"}, "invalid_api_key", "placeholder whose variable was not filled in"),
        ({b"authorization": b"Bearer EMPTY"}, "invalid_api_key", "filler word"),
        ({b"x-api-key": b"sk-hr-" + b"a" * 43}, "invalid_api_key", "a wrong character"),
        ({b"x-api-key": b"\xff\xfe"}, "invalid_api_key", "another service"),
    ],
)
def test_a_401_names_its_cause_and_what_helps(
    store: KeyStore, index: KeyIndex, headers: dict[bytes, bytes], code: str, says: str
) -> None:
    made(store, index)
    status, found, message = refusal(index, headers)
    assert (status, found) == (401, code)
    assert says in message
    assert "with `headrace key create`" in message and "/api-keys" not in message
    assert all(value.decode("latin-1") not in message for value in headers.values() if len(value) > 8)


def test_a_page_for_keys_is_named_where_there_is_one(store: KeyStore, clock: Clock) -> None:
    index = KeyIndex(store, page="https://keys.example/", now_s=clock)
    secret = made(store, index, expires_at=clock() + DAY_S)
    for headers in ({}, bearer("sk-hr-wrong"), {b"authorization": b"Token x"}):
        assert "made on https://keys.example/ or with `headrace key create`" in refusal(index, headers)[2]
    warning = dict(index.warning_headers(index.authenticate(bearer(secret), None)))[b"warning"]
    assert warning.endswith(b'; see https://keys.example/"')
    clock.now_s += 2 * DAY_S
    assert "on https://keys.example/" in refusal(index, bearer(secret))[2]


def test_an_expired_key_is_told_the_date(store: KeyStore, index: KeyIndex, clock: Clock) -> None:
    secret = made(store, index, expires_at=clock() + DAY_S)
    index.authenticate(bearer(secret), None)
    clock.now_s += 2 * DAY_S
    status, code, message = refusal(index, bearer(secret))
    assert (status, code) == (401, "key_expired")
    assert "expired on 2026-11-30 12:00 UTC" in message


def test_a_revoked_key_is_told_so_and_its_name_is_free_again(store: KeyStore, index: KeyIndex) -> None:
    secret = made(store, index)
    assert store.revoke("vllm-local-dev").revoked_at is not None
    index.reload()
    assert refusal(index, bearer(secret))[:2] == (401, "key_revoked")
    again = made(store, index)
    assert index.authenticate(bearer(again), None).name == "vllm-local-dev"


def test_after_a_rotation_both_secrets_work_until_the_grace_is_over(
    store: KeyStore, index: KeyIndex, clock: Clock
) -> None:
    old = made(store, index)
    _, new = store.rotate("vllm-local-dev", grace_s=3600)
    index.reload()
    assert index.authenticate(bearer(old), None).id == index.authenticate(bearer(new), None).id
    clock.now_s += 3601
    assert index.authenticate(bearer(new), None).name == "vllm-local-dev"
    status, code, message = refusal(index, bearer(old))
    assert (status, code) == (401, "key_expired")
    assert "replaced by a rotation" in message


def test_a_rotation_without_grace_ends_the_old_secret_at_once(store: KeyStore, index: KeyIndex) -> None:
    old = made(store, index)
    store.rotate("vllm-local-dev", grace_s=0)
    index.reload()
    assert refusal(index, bearer(old))[0] == 401


def test_the_last_seven_days_of_a_key_are_announced(store: KeyStore, index: KeyIndex, clock: Clock) -> None:
    secret = made(store, index, expires_at=clock() + 8 * DAY_S)
    record = index.authenticate(bearer(secret), None)
    assert index.warning_headers(record) == []
    clock.now_s += 1.5 * DAY_S
    warning, date = index.warning_headers(record)
    assert warning[0] == b"warning" and b"expires on 2026-12-07 12:00 UTC" in warning[1]
    assert date == (b"x-headrace-key-expires", b"2026-12-07 12:00 UTC")


@pytest.mark.parametrize(
    ("allowed", "sender", "passes"),
    [
        (("10.0.0.0/8",), "10.1.2.3", True),
        (("10.0.0.0/8",), "11.1.2.3", False),
        (("192.0.2.7",), "192.0.2.7", True),
        (("2001:db8::/32",), "2001:db8::1", True),
        (("10.0.0.0/8",), "::ffff:10.1.2.3", True),
        (("10.0.0.0/8",), None, False),
        (("10.0.0.0/8",), "unix:", False),
        ((), None, True),
    ],
)
def test_a_key_may_be_used_from_its_addresses_only(
    store: KeyStore, index: KeyIndex, allowed: tuple[str, ...], sender: str | None, passes: bool
) -> None:
    secret = made(store, index, allowed_ips=allowed)
    if passes:
        index.authenticate(bearer(secret), sender)
    else:
        assert refusal(index, bearer(secret), sender)[:2] == (403, "ip_not_allowed")


@pytest.mark.parametrize(
    ("key_models", "plan_models", "name", "refused_by"),
    [
        (("qwen*",), (), "qwen2-7b-local", None),
        (("qwen*",), (), "gpt-4o", "API key"),
        ((), ("qwen*",), "gpt-4o", "plan coding"),
        (("gpt-*",), ("qwen*",), "gpt-4o", "plan coding"),
        (("org/model-[ab]",), (), "org/model-a", None),
        (("Qwen*",), (), "qwen2", "API key"),
    ],
)
def test_a_key_and_its_plan_both_must_open_a_model(
    store: KeyStore,
    index: KeyIndex,
    key_models: tuple[str, ...],
    plan_models: tuple[str, ...],
    name: str,
    refused_by: str | None,
) -> None:
    record = index.authenticate(bearer(made(store, index, models=key_models)), None)
    plan = Plan(name="coding", models=plan_models)
    if refused_by is None:
        index.check_model(record, plan, name)
        return
    with pytest.raises(ApiError) as caught:
        index.check_model(record, plan, name)
    assert (caught.value.status, caught.value.code) == (403, "model_not_allowed")
    assert refused_by in caught.value.message and name in caught.value.message


def test_a_key_keeps_everything_it_was_given(store: KeyStore, clock: Clock) -> None:
    limits = Limits(rpm=60, tpm=10_000, concurrency=4, budget_micros=5_000_000, budget_period="month")
    wanted = KeyRequest(
        name="ci",
        tags=("test", "ci"),
        plan="coding",
        models=("qwen*",),
        limits=limits,
        allowed_ips=("10.1.2.3", "10.9.0.0/16"),
        expires_at=clock() + DAY_S,
    )
    record, secret = store.create(wanted)
    assert (record.name, record.tags, record.plan, record.models) == ("ci", ("test", "ci"), "coding", ("qwen*",))
    assert (record.limits, record.expires_at) == (limits, clock() + DAY_S)
    assert record.allowed_ips == ("10.1.2.3/32", "10.9.0.0/16")
    assert record.shown == f"{secret[:10]}...{secret[-4:]}"
    assert store.find("ci") == record


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (KeyRequest(name=" "), "1 to 100 printable characters"),
        (KeyRequest(name="a\nb"), "printable"),
        (KeyRequest(name="a", expires_at=1.0), "lies in the past"),
        (KeyRequest(name="a", allowed_ips=("10.0.0.300",)), "10.0.0.300 is not an address"),
        (KeyRequest(name="a", limits=Limits(rpm=0)), "rpm must be 1 or more"),
        (KeyRequest(name="a", limits=Limits(budget_micros=0)), "more than 0"),
    ],
)
def test_a_key_that_makes_no_sense_is_refused(store: KeyStore, request_: KeyRequest, says: str) -> None:
    with pytest.raises(KeyMistake, match=says):
        store.create(request_)
    assert store.records() == []


def test_two_keys_in_use_cannot_share_a_name(store: KeyStore) -> None:
    store.create(KeyRequest(name="ci"))
    with pytest.raises(KeyMistake, match="called ci is in use"):
        store.create(KeyRequest(name="ci"))


def test_an_unknown_name_gets_the_nearest_one(store: KeyStore) -> None:
    store.create(KeyRequest(name="vllm-local-dev"))
    with pytest.raises(KeyMistake, match="Did you mean vllm-local-dev"):
        store.revoke("vllm_local_dev")


def test_the_first_start_makes_a_key_and_later_ones_show_it(store: KeyStore) -> None:
    record, secret = store.first()
    assert secret is not None and secret.startswith(record.prefix)
    assert store.first() == (record, None)


def test_a_key_that_was_let_in_before_is_looked_at_again_each_time(
    store: KeyStore, index: KeyIndex, clock: Clock
) -> None:
    secret = made(store, index, allowed_ips=("10.0.0.1",), expires_at=clock.now_s + 60)
    ways = [bearer(secret), {b"x-api-key": secret.encode()}, {b"api-key": f" {secret} ".encode()}]
    for headers in ways:
        assert [index.authenticate(headers, "10.0.0.1").name for _ in range(3)] == ["vllm-local-dev"] * 3
        assert refusal(index, headers, "10.0.0.2")[:2] == (403, "ip_not_allowed")
    clock.now_s += 61
    assert {refusal(index, headers, "10.0.0.1")[1] for headers in ways} == {"key_expired"}
    store.change("vllm-local-dev", expires_at=None, limits=Limits(rpm=7))
    index.reload()
    assert {index.authenticate(headers, "10.0.0.1").limits.rpm for headers in ways} == {7}
    store.revoke("vllm-local-dev")
    index.reload()
    assert {refusal(index, headers, "10.0.0.1")[1] for headers in ways} == {"key_revoked"}
    assert {refusal(index, {**headers, b"authorization": b"Bearer other"}, "10.0.0.1")[0] for headers in ways} == {401}


def test_the_same_key_with_and_without_another_beside_it(
    store: KeyStore, index: KeyIndex, caplog: pytest.LogCaptureFixture
) -> None:
    secret, other = made(store, index), made(store, index, "other")
    both = {**bearer(secret), b"x-api-key": other.encode()}
    names = [
        index.authenticate(headers, None).name
        for headers in (bearer(secret), both, both, {b"x-api-key": other.encode()})
    ]
    assert names == ["vllm-local-dev"] * 3 + ["other"]
    assert len(caplog.records) == 2


def test_headers_in_ever_other_spellings_fill_no_memory(
    store: KeyStore, index: KeyIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_index, "MAX_MARKS", 3)
    secret = made(store, index)
    for blanks in range(10):
        assert index.authenticate({b"authorization": b"Bearer" + b" " * blanks + b" " + secret.encode()}, None)
    assert len(index._keys.by_mark) <= 3


def test_a_key_can_be_given_other_rights(store: KeyStore, index: KeyIndex) -> None:
    secret = made(store, index)
    store.change("vllm-local-dev", name="renamed", limits=Limits(rpm=5))
    index.reload()
    record = index.authenticate(bearer(secret), None)
    assert (record.name, record.limits.rpm) == ("renamed", 5)


OTHER_RIGHTS: KeyChanges = {
    "name": "renamed",
    "tags": ("prod", "team-b"),
    "plan": "large",
    "models": ("gpt-*",),
    "limits": Limits(rpm=7, tpm=70, concurrency=3, budget_micros=9, budget_period="week"),
    "allowed_ips": ("192.0.2.0/24",),
    "expires_at": 1_895_953_600.0,
    "prompts_kept_s": 60.0,
}


@pytest.mark.parametrize("name", OTHER_RIGHTS)
def test_a_change_of_one_right_leaves_every_other(store: KeyStore, index: KeyIndex, name: str) -> None:
    assert set(OTHER_RIGHTS) == {each.name for each in fields(KeyRequest)} == set(KeyChanges.__annotations__)
    made(store, index, tags=("dev",), plan="small", models=("qwen*",), limits=Limits(rpm=5),
         allowed_ips=("10.0.0.0/8",), expires_at=1_795_953_700.0, prompts_kept_s=3600.0)  # fmt: skip
    before = store.find("vllm-local-dev")
    after = store.change("vllm-local-dev", **{name: OTHER_RIGHTS[name]})  # type: ignore[literal-required, misc]
    assert store.find(before.id) == after
    assert {each for each in OTHER_RIGHTS if getattr(after, each) != getattr(before, each)} == {name}
    assert getattr(after, name) == OTHER_RIGHTS[name]  # type: ignore[literal-required]
    assert (after.id, after.shown, after.created_at, after.state(0.0)) == (
        before.id, before.shown, before.created_at, "active"
    )  # fmt: skip


def test_prompts_are_no_longer_kept_once_that_is_said(store: KeyStore, index: KeyIndex) -> None:
    made(store, index, prompts_kept_s=60.0, limits=Limits(rpm=5))
    record = store.change("vllm-local-dev", prompts_kept_s=None)
    assert (record.prompts_kept_s, record.limits.rpm) == (None, 5)


def test_a_key_that_has_expired_can_be_changed_and_stays_expired(store: KeyStore, clock: Clock) -> None:
    store.create(KeyRequest(name="ci", expires_at=clock.now_s + 60))
    clock.now_s += 120
    assert store.change("ci", prompts_kept_s=60.0).state(clock.now_s) == "expired"
    with pytest.raises(KeyMistake, match="in the past"):
        store.change("ci", expires_at=clock.now_s - 1)


def code_for(index: KeyIndex, secret: str) -> str | None:
    """The code of the refusal; None = the key is taken."""
    try:
        index.authenticate(bearer(secret), None)
    except ApiError as error:
        return error.code
    return None


def revoke_in_another_process(data_dir: str, name: str) -> None:
    store = open_store(None, data_dir)
    store.revoke(name)
    store.database.close()


def test_a_revocation_in_one_process_is_seen_in_another_within_a_second(tmp_path: Path) -> None:
    ledger = open_ledger(None, tmp_path)
    _, secret = ledger.store.create(KeyRequest(name="ci"))
    ledger.keys.reload()
    worker = multiprocessing.get_context("spawn").Process(target=revoke_in_another_process, args=(str(tmp_path), "ci"))
    try:
        worker.start()
        worker.join(60)
        done = time.monotonic()
        while code_for(ledger.keys, secret) is None and time.monotonic() - done < 1.0:
            time.sleep(0.01)
        assert code_for(ledger.keys, secret) == "key_revoked"
    finally:
        ledger.close()


def test_usage_written_elsewhere_does_not_make_the_keys_be_read_again(tmp_path: Path) -> None:
    ledger = open_ledger(None, tmp_path)
    try:
        before = ledger.keys.records
        event = {"key_id": "k", "key_name": "k", "model": "m", "upstream": "u", "upstream_model": "m"}
        ledger.usage.append(UsageEvent(time_s=time.time(), endpoint="chat", status=200, **event))
        assert ledger.usage.flush()
        time.sleep(0.6)
        assert ledger.keys.records is before
    finally:
        ledger.close()


def test_a_secret_is_in_no_file_and_no_log(tmp_path: Path) -> None:
    code = (
        "import logging, sys\n"
        "logging.basicConfig(level=logging.DEBUG)\n"
        "logging.getLogger('sqlalchemy.engine').setLevel(logging.DEBUG)\n"
        "from headrace.gateway.ledger import open_ledger\n"
        "from headrace.gateway.keys import KeyRequest\n"
        "ledger = open_ledger(None, sys.argv[1])\n"
        "record, secret = ledger.store.create(KeyRequest(name='canary'))\n"
        "_, second = ledger.store.rotate('canary')\n"
        "ledger.keys.reload()\n"
        "ledger.keys.authenticate({b'authorization': b'Bearer ' + secret.encode(), b'api-key': b'other'}, None)\n"
        "try:\n"
        "    ledger.keys.authenticate({b'authorization': b'Bearer' + secret.encode()}, None)\n"
        "except Exception as error:\n"
        "    logging.error('%s %r', error, error)\n"
        "print(record, ledger.keys.records, file=sys.stderr)\n"
        "ledger.close()\n"
        "print(secret, second)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 2
    for secret in result.stdout.split():
        middle = secret[10:-4]
        assert middle not in result.stderr
        assert all(middle.encode() not in content for content in files)


@pytest.mark.parametrize("length", [1, 32, 64, 65, 200])
def test_what_is_stored_of_a_secret_is_its_hmac(length: int) -> None:
    pepper, secret = bytes(range(length)), key_secrets.new_secret()
    expected = hmac.digest(pepper, secret.encode(), "sha256").hex()
    assert key_secrets.digest(pepper, secret) == key_secrets.digest(pepper, secret) == expected
