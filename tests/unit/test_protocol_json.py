"""Request bodies: what is refused, and that the message says where."""

from __future__ import annotations

import json
from typing import Literal, get_args, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol.errors import ApiError
from headrace.protocol.json import Body
from headrace.server.routes import ROUTES


class Sample(msgspec.Struct, kw_only=True):
    count: int | None = None
    share: float | None = None
    words: str | list[str] | None = None
    bias: dict[int, float] | None = None


class Needs(msgspec.Struct, kw_only=True):
    messages: list[dict[str, object]]


def literals(kind: object) -> list[object]:
    """The values of a type that has a fixed set of them."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [value for part in get_args(kind) for value in literals(part)]


def refusal(body: bytes, type: type[msgspec.Struct] = Sample) -> ApiError:
    with pytest.raises(ApiError) as caught:
        Body(body).read(type)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "it is empty"),
        (b'{"count": 1', "line 1 column 12"),
        (b'{"count": 1,\n "share": }', "line 2 column 11"),
        (b'{"count": 1,}', "line 1 column 1"),
        (b'{"share": NaN}', "NaN is not a JSON number"),
        (b'{"share": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"words": "\\ud83d"}', "surrogate"),
        (b'{"words": "\xff"}', "byte 11 is not UTF-8"),
        (b'{"count": 1} x', "Extra data"),
        (b"[[[[", "line 1 column 5"),
        (b"[1, 2", "line 1 column 6"),
        (b"5 5", "Extra data"),
        (b'{"count": "x", "share": [}', "line 1 column 26"),
        (b'{"words": ' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_malformed_json_is_refused_with_the_place(body: bytes, said: str) -> None:
    error = refusal(body)
    assert error.code == "invalid_json"
    assert said in error.message


@pytest.mark.parametrize(("body", "found"), [(b"[]", "a list"), (b'"hi"', "a string"), (b"3", "an integer")])
def test_a_body_that_is_no_object_is_refused(body: bytes, found: str) -> None:
    assert found in refusal(body).message


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        (b'{"count": true}', "count", "`count` must be an integer, but it is true or false (true)."),
        (b'{"count": "5"}', "count", '`count` must be an integer, but it is a string ("5").'),
        (b'{"count": 1.5}', "count", "(1.5)"),
        (b'{"share": "warm"}', "share", "`share` must be a number"),
        (b'{"share": 1e999}', "share", "out of range"),
        (b'{"words": [1]}', "words[0]", "`words[0]` must be a string"),
        (b'{"bias": {"x": 1}}', "bias", "must be an integer"),
    ],
)
def test_a_wrong_type_is_refused_with_field_and_value(body: bytes, param: str, said: str) -> None:
    error = refusal(body)
    assert error.param == param
    assert said in error.message


def test_a_missing_field_is_named() -> None:
    assert refusal(b"{}", Needs).param == "messages"


def test_a_key_sent_twice_is_refused_and_named() -> None:
    error = refusal(b'{"count": 1, "words": "a", "cou\\u006et": 2}')
    assert (error.code, error.param) == ("duplicate_key", "count")


def test_one_key_twice_among_very_many_is_found() -> None:
    many = b"".join(b'"k%d": 1, ' % number for number in range(200_000))
    assert refusal(b"{" + many + b'"count": 1, "k199999": 2}').param == "k199999"


def test_the_same_key_inside_nested_objects_and_strings_is_no_duplicate() -> None:
    body = Body(b'{"count": 1, "other": {"count": 2, "count": 3}, "words": "\\"count\\": [{", "list": [{"count": 4}]}')
    assert body.read(Sample).count == 1


def test_fields_that_nobody_read_are_kept_with_their_values() -> None:
    body = Body(b'{"count": 1, "zeal": [1, {"a": null}], "words": null}')
    body.read(Sample)
    assert body.others() == {"zeal": [1, {"a": None}]}


@given(st.dictionaries(st.text(max_size=8), st.recursive(st.none() | st.text(), st.lists, max_leaves=5), max_size=6))
def test_any_object_with_distinct_keys_is_read_whole(value: dict[str, object]) -> None:
    assert Body(json.dumps(value).encode()).others() == value


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=8), min_size=1, max_size=6), st.data())
def test_any_repeated_key_is_found(value: dict[str, str], data: st.DataObject) -> None:
    repeated = data.draw(st.sampled_from(sorted(value)))
    pairs = [f"{json.dumps(key)}: {json.dumps(text)}" for key, text in (*value.items(), (repeated, "again"))]
    with pytest.raises(ApiError) as caught:
        Body(("{" + " , ".join(pairs) + "}").encode())
    assert caught.value.param == repeated


@pytest.mark.parametrize("key", ["abc", "1.5", " 1", "1_0", "\u0661", "", "0x1", "01", "+1"])
def test_a_key_that_is_no_integer_is_blamed_and_not_its_value(key: str) -> None:
    error = refusal(json.dumps({"bias": {"5": 1, key: 2}}, ensure_ascii=False).encode())
    assert (error.param, error.code) == ("bias", "invalid_value")
    assert error.message == f"a key of `bias` must be an integer, but one is {json.dumps(key, ensure_ascii=False)}."


FIXED = [
    (body, field.encode_name, values)
    for body in dict.fromkeys(body for route in ROUTES for body in route.body)
    for field in msgspec.structs.fields(body)
    if (values := literals(field.type))
]


@pytest.mark.parametrize(("body", "name", "values"), FIXED)
def test_a_value_outside_a_fixed_set_is_told_all_that_are_in_it(
    body: type[msgspec.Struct], name: str, values: list[str]
) -> None:
    needed = {f.encode_name: [] for f in msgspec.structs.fields(body) if f.required}
    with pytest.raises(ApiError) as caught:
        Body(msgspec.json.encode({name: "middle", **needed})).read(body)
    assert caught.value.param in (name, *needed)
    if caught.value.param == name:
        assert all(json.dumps(value) in caught.value.message for value in values)
        assert '"middle"' in caught.value.message


def test_truncation_side_is_one_of_them() -> None:
    assert {"truncation_side", "encoding_format"} <= {name for _, name, _ in FIXED}
