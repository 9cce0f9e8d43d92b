"""A request body of which only the outermost level is read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.body import MAX_FIELDS, Fields, form_field
from headrace.protocol.errors import ApiError

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(), values, max_size=6)


def layout(value: object, choice: int) -> bytes:
    """The same JSON in one of several layouts."""
    if choice == 0:
        return json.dumps(value).encode()
    if choice == 1:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return ("\n " + json.dumps(value, indent=3) + " \n").encode()


@settings(max_examples=40, deadline=None)
@given(objects, objects, st.integers(0, 2))
def test_a_change_changes_that_field_and_nothing_else(fields: dict, changes: dict, choice: int) -> None:
    changed = Fields(layout(fields, choice)).changed(changes)
    assert json.loads(changed) == {**fields, **changes}


@settings(max_examples=40, deadline=None)
@given(objects, st.integers(0, 2))
def test_nothing_to_change_is_the_very_object(fields: dict, choice: int) -> None:
    body = layout(fields, choice)
    assert Fields(body).changed({}) is body


def test_the_rest_stays_byte_for_byte() -> None:
    body = b'{ "x" : 1.00,"model":"a", "y":"\\u00e9\\/" ,"z":[1,  2]}'
    assert Fields(body).changed({"model": "bb"}) == b'{ "x" : 1.00,"model":"bb", "y":"\\u00e9\\/" ,"z":[1,  2]}'
    assert Fields(body).changed({"n": 1})[:-7] == body[:-1]


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"cheap","model":"dear"}',
        b'{"model":"same","model":"same"}',
        b'{"model":1,"model":12}',
        b'{"model":12,"model":1}',
        b'{"a":{"model":1},"model":"x","mod\\u0065l":"y"}',
        b'{"a":"x\\",\\"b\\":1","b":2,"a":"x"}',
        b'{"b":2,"a":"x,\\"b\\":2}","a":"x"}',
    ],
)
def test_a_key_that_is_there_twice_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as refusal:
        Fields(body)
    assert (refusal.value.status, refusal.value.code) == (400, "duplicate_key")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), values), min_size=2, max_size=5))
def test_duplicates_are_found_in_any_object(pairs: list) -> None:
    body = ("{" + ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in pairs) + "}").encode()
    names = [name for name, _ in pairs]
    if len(set(names)) == len(names):
        assert Fields(body).raws.keys() == set(names)
    else:
        with pytest.raises(ApiError):
            Fields(body)


def test_the_same_key_deeper_down_is_none_of_our_business() -> None:
    assert Fields(b'{"model":"a","x":{"model":"b","model":"c"}}').value("model") == "a"


@pytest.mark.parametrize("body", [b"", b"[]", b'"x"', b"{", b'{"a":}', b"\xff"])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as refusal:
        Fields(body)
    assert (refusal.value.status, refusal.value.code) == (400, "invalid_json")


def test_a_form_field_is_found_where_it_stands() -> None:
    body = (
        b'--xyz\r\ncontent-disposition: form-data; name="file"; filename="model"\r\ncontent-type: audio/wav\r\n\r\n'
        b'RIFF name="model"\r\n--xyz\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--xyz--\r\n'
    )
    span = form_field(body, b"multipart/form-data; boundary=xyz", "model")
    assert span is not None and body[span[0] : span[1]] == b"whisper"
    assert form_field(body, b"multipart/form-data; boundary=xyz", "language") is None


FORM = b"multipart/form-data; boundary=x"
PART = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n'
MODEL = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (PART + MODEL + b"--x--\r\n", b"m"),
        (MODEL + PART + b"--x--", b"m"),
        (b"to whom it may concern\r\n" + MODEL + b"--x--", b"m"),
        (b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\n\r\n--x--', b""),
        (b"--x\r\nX: y\r\ncontent-DISPOSITION: form-data; name=model; filename=q\r\nA: b\r\n\r\nzz\r\n--x--", b"zz"),
        (PART + b"--x--", None),
        (MODEL[:-3], None),
        (b"--x--", None),
        (b"", None),
    ],
)
def test_a_form_is_read_part_by_part(body: bytes, value: bytes | None) -> None:
    span = form_field(body, FORM, "model")
    assert (None if span is None else body[span[0] : span[1]]) == value


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "body",
    [
        b"--x\r\n" * 1_000_000,
        b"--x\r\n\r\n\r\n" * 500_000,
        b"--x\r\n" + b"content-disposition: form-data\r\n" * 100_000,
        b"--x\r\ncontent-disposition: " + b" name=" * 500_000 + b"\r\n",
        PART * 100_000,
    ],
    ids=["marks", "empty parts", "headers", "names", "parts"],
)
def test_no_form_takes_long(body: bytes) -> None:
    """Each of these took a search that begins again at every mark hours."""
    assert form_field(body, FORM, "model") is None


def test_a_body_of_too_many_fields_is_refused() -> None:
    fields = [b'"k%d":1' % number for number in range(MAX_FIELDS + 1)]
    assert len(Fields(b"{" + b",".join(fields[1:]) + b"}").raws) == MAX_FIELDS
    with pytest.raises(ApiError, match=r"has 1001 fields; at most 1000 are read"):
        Fields(b"{" + b",".join(fields) + b"}")
