"""A dry run looks at everything that a start would stumble over: the tokenizer, the template, the defaults."""

from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli.dry_run import WORKED_OUT
from headrace.cli.main import main
from headrace.runtime.devices import available_threads
from tests.serving import HEADRACE
from tests.tiny_models import tiny_llama

Capture = pytest.CaptureFixture[str]


def dry_run(model: Path, *words: str) -> int:
    return main(["serve", str(model), "--dry-run", "--kv-cache-memory-bytes", "8M", "--device", "cpu", *words])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json does not exist"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "is not a tokenizer.json that can be read"),
        (
            lambda folder: (folder / "generation_config.json").write_text('{"temperature": -1}'),
            "must be between 0 and 100",
        ),
    ],
)
def test_files_that_a_start_would_refuse_are_refused(
    tmp_path: Path, capsys: Capture, spoil: Callable[[Path], object], said: str
) -> None:
    model = tiny_llama(tmp_path)
    assert dry_run(model) == 0
    spoil(model)
    assert dry_run(model) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--chat-template", "{% for"), "--chat-template: the chat template does not parse"),
        (("--override-generation-config", '{"temprature": 1}'), "does not know `temprature`"),
        (("--override-generation-config", '{"temperature": 900}'), "must be between 0 and 100"),
    ],
)
def test_flags_that_a_start_would_refuse_are_refused(
    tmp_path: Path, capsys: Capture, words: tuple[str, ...], said: str
) -> None:
    assert dry_run(tiny_llama(tmp_path), *words) == 2
    assert said in capsys.readouterr().err


def test_a_mistake_in_the_text_and_one_in_the_memory_are_both_named(tmp_path: Path, capsys: Capture) -> None:
    words = ("--chat-template", "{% for", "--kv-cache-memory-bytes", "100T")
    assert dry_run(tiny_llama(tmp_path), *words) == 2
    shown = capsys.readouterr().err
    assert "does not parse" in shown and "Use --kv-cache-memory-bytes" in shown


def test_a_broken_template_of_the_model_s_own_is_left_out_with_a_note(tmp_path: Path, capsys: Capture) -> None:
    file = tiny_llama(tmp_path) / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": "{% if"}))
    assert dry_run(tmp_path) == 0
    assert "Note: The model's own template is left out: the chat template does not parse" in capsys.readouterr().out


def test_the_effective_settings_are_those_that_a_start_would_have(tmp_path: Path, capsys: Capture) -> None:
    assert dry_run(tiny_llama(tmp_path), "--json", "--kv-cache-memory-bytes", "96K") == 0
    answer = json.loads(capsys.readouterr().out)
    engine, startup = answer["engine"], answer["startup"]
    assert "max_model_len is 192" in " ".join(startup["notes"])
    assert engine["max_model_len"] == startup["max_model_len"] == 192
    for name in WORKED_OUT:
        assert engine[name] == startup[name] != "auto", name
        assert engine[name] is not None, name
    assert dry_run(tmp_path) == 0
    assert "  max_model_len = 512\n" in capsys.readouterr().out


def test_more_threads_than_cpus_are_noted(tmp_path: Path, capsys: Capture) -> None:
    usable = available_threads()
    assert dry_run(tiny_llama(tmp_path), "--threads", str(usable)) == 0
    assert "--threads" not in capsys.readouterr().out
    assert dry_run(tmp_path, "--threads", str(usable + 3)) == 0
    shown = capsys.readouterr().out
    assert f"Note: --threads {usable + 3} on {usable} CPU" in shown
    assert f"--threads {usable} is as many as help" in shown


def test_threads_that_cannot_be_started_are_one_line(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    words = [str(model), "--threads", "1000", "--kv-cache-memory-bytes", "8M", "--device", "cpu", "--port", "0"]
    for more in (["--dry-run"], []):
        result = subprocess.run(
            [str(HEADRACE), "serve", *words, *more],
            capture_output=True,
            text=True,
            timeout=60,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, 3 << 30)),
        )
        assert result.returncode == (2 if more else 1)
        assert "--threads 1000: so many cannot be started here: " in result.stderr
        assert f"use --threads {available_threads()}." in result.stderr
        assert "Traceback" not in result.stderr
