"""What a file, or a call of Python, gives as flags: nothing in it is dropped, whatever kind of value it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config.command_line import parse_command_line, parse_table
from headrace.config.flag_table import FLAGS
from headrace.config.flags import Flag
from headrace.gateway.config_load import InvalidConfig, load_config

ONE_VALUE = [flag for flag in FLAGS if not flag.many and flag.name != "config"]
A_TEXT = [flag for flag in FLAGS if flag.kind == "text" and flag.name != "config"]


def names(flag: Flag) -> list[str]:
    return [flag.name, flag.name.replace("-", "_"), *flag.aliases]


def errors_of_file(folder: Path, text: str, name: str = "c.yaml") -> list[str]:
    (folder / name).write_text(text)
    return [
        line.removeprefix(f"{folder / name}: ") for line in parse_command_line(["--config", f"{folder / name}"]).errors
    ]


def errors_of_engine(folder: Path, text: str) -> list[str]:
    """What is wrong with the keys of an [engine.NAME]."""
    (folder / "headrace.toml").write_text(f"[engine.one]\n{text}\n")
    with pytest.raises(InvalidConfig) as caught:
        load_config(folder / "headrace.toml", {})
    return list(caught.value.problems)


def test_a_list_for_a_flag_of_one_value_is_an_error_for_every_flag() -> None:
    for flag in ONE_VALUE:
        for name in names(flag):
            assert parse_table({name: [1, 2]}).errors == [f"LLM: {name} takes one value, and this is a list of 2."]
            assert parse_table({name: ("a",)}).errors == [f"LLM: {name} takes one value, and this is a list of 1."]


def test_a_table_for_a_flag_that_takes_none_is_an_error_for_every_flag() -> None:
    for flag in FLAGS:
        if not flag.takes_json and flag.name != "config":
            value: object = [{"a": 1}] if flag.many else {"a": 1}
            assert parse_table({flag.name: value}).errors == [f"LLM: {flag.name} takes one value, and this is a table."]


def test_a_word_that_yaml_reads_as_true_is_no_text_for_any_flag() -> None:
    for flag in A_TEXT:
        (line,) = parse_table({flag.name: [True] if flag.many else True}).errors
        assert line.startswith(f"LLM: {flag.name} takes a text, and this is true or false")


def test_one_flag_under_two_names_is_an_error_for_every_flag() -> None:
    for flag in FLAGS:
        first, *others = dict.fromkeys(names(flag))
        for other in others if flag.name != "config" else ():
            errors = parse_table({first: None, other: None}).errors
            assert errors == [f"LLM: {first} and {other} are the same flag: keep one."]
        if flag.kind == "switch":
            errors = parse_table({first: True, f"no-{first}": False}).errors
            assert errors == [f"LLM: {first} and no-{first} are the same flag: keep one."]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-model-len: [1, 2]", "max-model-len takes one value, and this is a list of 2."),
        ("port:\n- 8001\n- 8002", "port takes one value, and this is a list of 2."),
        ("host: {a: b}", "host takes one value, and this is a table."),
        ("revision: yes", "revision takes a text, and this is true or false: put the word into quotes if it is meant."),
        ("served-model-name: [a, null]", "served-model-name takes a plain list, without lists or empty values in it."),
        ("served-model-name: [a, [b]]", "served-model-name takes a plain list, without lists or empty values in it."),
        ("served-model-name: []", "served-model-name needs a value, such as --served-model-name qwen2.5-7b."),
        ("max_model_len: 5\nmax-model-len: 6", "max_model_len and max-model-len are the same flag: keep one."),
        ("hf-overrides.a: 1", "hf-overrides.a: write hf-overrides as a table with a in it."),
    ],
)
def test_a_value_of_another_kind_in_a_file_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    assert errors_of_file(tmp_path, text) == [said]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("port: 1\nhost: h\nport: 2", "the key port stands twice, in lines 1 and 3; keep one."),
        ('port: 1\n"port": 2', "the key port stands twice, in lines 1 and 2; keep one."),
        ("hf-overrides:\n  a: 1\n  a: 2", "the key a stands twice, in lines 2 and 3; keep one."),
        ("hf-overrides: {a: {b: 1,\n b: 2}}", "the key b stands twice, in lines 1 and 2; keep one."),
        ("hf-overrides: &x {a: 1}\nport: *x\nport: 1", "the key port stands twice, in lines 2 and 3; keep one."),
    ],
)
def test_a_key_that_stands_twice_in_yaml_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    path = str(tmp_path / "c.yaml")
    assert errors_of_file(tmp_path, text) == [f"--config {path}: {said}"]


def test_a_key_that_stands_twice_in_json_is_an_error() -> None:
    for flag in FLAGS:
        if flag.takes_json:
            errors = parse_command_line([flag.option, '{"a": {"b": 1, "b": 2}}']).errors
            assert errors == [f'{flag.option} {{"a": {{"b": 1, "b": 2}}}}: the key b stands twice in one object.']


def test_keys_of_different_tables_may_be_alike(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("hf-overrides: &x {a: 1, b: {a: 2}}\noverride-generation-config: *x\nseed: 3\n")
    given = parse_command_line(["--config", str(tmp_path / "c.yaml")])
    assert given.errors == []
    assert given.values["hf-overrides"] == given.values["override-generation-config"] == {"a": 1, "b": {"a": 2}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_model_len = [1, 2]", "engine.one.max_model_len takes one value, and this is a list of 2."),
        ("port = [8001, 8002]", "engine.one.port takes one value, and this is a list of 2."),
        ("host = {a = 1}", "engine.one.host takes one value, and this is a table."),
        (
            "enable_prefix_caching = [true, false]",
            "engine.one.enable_prefix_caching takes one value, and this is a list of 2.",
        ),
        (
            "max_model_len = 5\nmax-model-len = 6",
            "engine.one.max-model-len and max_model_len are the same flag: keep one.",
        ),
        (
            "api_key = ['sk-secret', ['sk-secret']]",
            "engine.one.api_key takes a plain list, without lists or empty values in it.",
        ),
    ],
)
def test_the_same_holds_for_an_engine_of_a_gateway_s_file(tmp_path: Path, text: str, said: str) -> None:
    (line,) = errors_of_engine(tmp_path, text)
    assert line.partition(": ")[2] == said


def test_every_flag_of_one_value_refuses_a_list_in_an_engine_s_table(tmp_path: Path) -> None:
    left_out = ("dry-run", "json")
    keys = [flag.name for flag in ONE_VALUE if flag.name not in left_out]
    lines = errors_of_engine(tmp_path, "\n".join(f"{key} = [1, 2]" for key in keys))
    assert [line.partition("engine.one.")[2].split()[0] for line in lines] == [
        key if key.replace("-", "_").isidentifier() else f'"{key}"' for key in keys
    ]
    assert all("takes one value, and this is a list of 2" in line for line in lines)
