"""The command line from outside: exit statuses, one line a mistake, config files, dry runs, what the start says."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.cli.main import main
from headrace.cli.startup import access_lines, base_url, block_lines, example_lines, print_block, room_line
from headrace.config.architecture import model_config
from headrace.config.command_line import parse_command_line
from headrace.config.load import LaunchError, load, settings
from headrace.config.model_tensors import needed_tensors
from headrace.config.settings import EngineSettings, ServerSettings
from headrace.protocol.ipc import EngineInfo
from tests.small_models import bundled_gguf

Capture = pytest.CaptureFixture[str]


# Commands


def test_help_lists_the_commands(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    assert "headrace serve [MODEL]" in capsys.readouterr().out


def test_a_mistyped_command_names_the_nearest(capsys: Capture) -> None:
    assert main(["sevre"]) == 2
    assert capsys.readouterr().err == "headrace: unknown command sevre. Did you mean headrace serve?\n"


def test_version_is_one_line(capsys: Capture) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("headrace 0.")


def test_help_groups_flags_by_what_a_person_wants(capsys: Capture) -> None:
    assert main(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    for group in ("Choose the model:", "Address and access:", "Memory:", "Batching and latency:", "Caching:"):
        assert group in shown
    assert "--[no-]enable-prefix-caching" in shown
    assert max(len(line) for line in shown.splitlines()) <= 120


def test_help_finds_a_flag_by_a_word(capsys: Capture) -> None:
    assert main(["serve", "--help=swap"]) == 0
    shown = capsys.readouterr().out
    assert "--swap-space" in shown and "--port" not in shown
    assert main(["serve", "--help=tp"]) == 0
    assert "-tp, --tensor-parallel-size" in capsys.readouterr().out


def test_mistakes_are_one_line_each_and_exit_status_2() -> None:
    words = ["serve", "--max-modle-len", "5", "--port", "x", "-tp", "2"]
    result = subprocess.run(
        [sys.executable, "-m", "headrace", *words], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "headrace serve: unknown flag --max-modle-len. Did you mean --max-model-len?",
        "headrace serve: --port x: not a whole number.",
        "headrace serve: -tp 2: Tensor parallelism: not built yet; use --tensor-parallel-size 1.",
    ]


def test_the_module_of_other_servers_commands_is_the_same_program() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "headrace.entrypoints.openai.api_server", "--model", "/nowhere/m", "--dtpye", "half"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 2
    assert "Did you mean --dtype?" in result.stderr
    assert "/nowhere/m does not exist" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["gateway", "--host", ""],
        ["gateway", "--host="],
        ["up", "--gateway-host", " "],
        ["key", "list", "--data-dir", ""],
    ],
)
def test_an_option_with_an_empty_value_is_an_error(words: list[str], capsys: Capture) -> None:
    assert main(words) == 2
    assert "is empty; it needs a value: --" in capsys.readouterr().err


# Config files


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[[str, str], str]:
    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


YAML = """
model: m
port: 9000
max_model_len: 4096
enable-prefix-caching: false
served-model-name: [a, b]
hf-overrides: {rope_theta: 500000.0}
tensor-parallel-size: 1
"""
TOML = """
model = "m"
port = 9000
max_model_len = 4096
enable-prefix-caching = false
served-model-name = ["a", "b"]
tensor-parallel-size = 1
[hf-overrides]
rope_theta = 500000.0
"""


@pytest.mark.parametrize(("name", "text"), [("c.yaml", YAML), ("c.yml", YAML), ("c.toml", TOML)])
def test_a_config_file_gives_flags(name: str, text: str, config_file: Callable[[str, str], str]) -> None:
    engine, server = settings(parse_command_line(["--config", config_file(name, text)]))
    assert engine == EngineSettings(
        model="m", max_model_len=4096, enable_prefix_caching=False, hf_overrides={"rope_theta": 500000.0}
    )
    assert (server.port, server.served_model_names) == (9000, ("a", "b"))


def test_the_command_line_wins_over_the_config_file(config_file: Callable[[str, str], str]) -> None:
    words = ["other", "--config", config_file("c.yaml", YAML), "--port", "1234", "--served-model-name", "c"]
    engine, server = settings(parse_command_line([*words, "--enable-prefix-caching"]))
    assert (engine.model, engine.enable_prefix_caching, engine.max_model_len) == ("other", True, 4096)
    assert (server.port, server.served_model_names) == (1234, ("c",))


def test_mistakes_in_a_config_file_name_it(config_file: Callable[[str, str], str]) -> None:
    path = config_file("c.yaml", "max-modle-len: 5\nport: x\nconfig: d.yaml\n")
    assert parse_command_line(["--config", path]).errors == [
        f"{path}: unknown flag max-modle-len. Did you mean max-model-len?",
        f"{path}: port x: not a whole number.",
        f"{path}: a config file cannot name another one (config).",
    ]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("c.yaml", "a: [", "not valid YAML"),
        ("c.toml", "a = ", "not valid TOML"),
        ("c.yaml", "- a\n", "must be a table of flags"),
    ],
)
def test_a_damaged_config_file_is_told(name: str, text: str, said: str, config_file: Callable[[str, str], str]) -> None:
    (line,) = parse_command_line(["--config", config_file(name, text)]).errors
    assert said in line and "\n" not in line


def test_a_config_file_that_is_not_there_is_told() -> None:
    (line,) = parse_command_line(["--config", "/nowhere/c.yaml"]).errors
    assert line == "--config /nowhere/c.yaml: cannot be read: No such file or directory."


# Checks with model files


def test_all_mistakes_of_flags_rules_and_model_come_together() -> None:
    words = ["/nowhere/m", "--gpu-memory-utilization", "1.5", "-tp", "2", "--prot", "1"]
    with pytest.raises(LaunchError) as caught:
        load(words)
    text = str(caught.value)
    for said in (
        "--prot. Did you mean --port?",
        "-tp 2: Tensor parallelism",
        "1.5 is a share",
        "/nowhere/m does not exist",
    ):
        assert said in text
    assert len(caught.value.errors) == 4


def test_the_bundled_model_is_the_default() -> None:
    launch = load([])
    assert launch.engine.model == str(bundled_gguf())
    assert launch.server.served_model_names == ("smollm2-135m-instruct",)
    assert launch.files.config.family == "llama"
    assert launch.notices == ()


def write_headers_only(folder: Path) -> Path:
    """A plain checkpoint of one layer: tensors of zeros."""
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "dtype": "float32",
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    shapes = needed_tensors(model_config(raw, "config.json"))
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def test_a_plain_checkpoint_with_the_awq_flag_is_refused(tmp_path: Path) -> None:
    model = write_headers_only(tmp_path / "m")
    with pytest.raises(LaunchError, match="--quantization awq: the checkpoint is plain"):
        load([str(model), "--quantization", "awq"])


def test_a_length_beyond_the_model_is_refused_unless_overridden() -> None:
    with pytest.raises(LaunchError, match="use --max-model-len 8192"):
        load(["--max-model-len", "32768"])
    words = ["--max-model-len", "16384", "--hf-overrides", '{"max_position_embeddings": 16384}']
    assert load(words).engine.max_model_len == 16384


def test_the_text_of_a_template_is_read(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}")
    for words in ([str(tmp_path / "t.jinja")], ["{{ messages[0].content }}"]):
        assert load(["--chat-template", *words]).server.chat_template == "{{ messages[0].content }}"
    with pytest.raises(LaunchError, match=r"--chat-template nowhere\.jinja: neither a readable file"):
        load(["--chat-template", "nowhere.jinja"])


@pytest.mark.parametrize("flag", ["--revision", "--download-dir"])
def test_a_flag_of_the_hub_beside_a_model_on_this_machine_is_noted(flag: str, tmp_path: Path) -> None:
    model = write_headers_only(tmp_path / "m")
    for name in (str(model), "smollm2-135m-instruct", None):
        notices = load([*([name] if name else []), flag, "x"]).notices
        assert f"{flag} x has no effect: the model is on this machine, not from the hub." in notices


# Dry runs


def test_a_dry_run_says_what_would_start(capsys: Capture) -> None:
    assert main(["serve", "--dry-run", "--max-model-len", "2048", "--swap-space", "0.5", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "Swap space  0.50 GiB of host memory" in shown
    assert "GPU memory utilization: 0.90" in shown
    assert "Maximum concurrency for 2,048 tokens per request:" in shown
    assert "max_model_len = 2048" in shown
    assert "nothing is running" in shown


def test_a_dry_run_as_json_can_be_read_by_machines(capsys: Capture) -> None:
    words = ["--dry-run", "--json", "--kv-cache-memory-bytes", "256M", "--api-key", "sk-a-long-secret-key"]
    assert main(["serve", *words, "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    answer = json.loads(text)
    assert answer["ok"] is True
    assert answer["engine"]["kv_cache_memory_bytes"] == 256 << 20
    assert answer["startup"]["num_blocks"] * answer["startup"]["block_size"] == answer["startup"]["kv_cache_tokens"]
    assert 0 < answer["startup"]["kv_cache_bytes"] <= 256 << 20
    assert answer["startup"]["base_url"] == "http://127.0.0.1:8000/v1"
    assert "secret" not in text


def test_a_dry_run_of_what_cannot_start_exits_2_with_all_errors(capsys: Capture) -> None:
    assert main(["serve", "--dry-run", "--json", "--dtype", "x", "--gpu-memory-utilization", "7"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert len(answer["errors"]) == 2


def test_a_dry_run_of_a_cache_that_does_not_fit_exits_2_with_the_size_that_does(capsys: Capture) -> None:
    assert main(["serve", "--dry-run", "--kv-cache-memory-bytes", "100T", "--device", "cpu"]) == 2
    assert "Use --kv-cache-memory-bytes" in capsys.readouterr().err


# What the start says

INFO = EngineInfo(
    model="smollm2-135m-instruct",
    family="llama",
    device="cpu",
    dtype="float32",
    kernels="reference",
    instruction_set="AVX2",
    threads=2,
    weight_bytes=3 << 29,
    kv_cache_bytes=4 << 30,
    kv_cache_dtype="float32",
    block_size=32,
    num_blocks=2912,
    kv_cache_tokens=93184,
    max_model_len=8192,
    max_num_seqs=256,
    max_num_batched_tokens=512,
    step_time_target_s=0.25,
    phase_seconds={"device": 1.0, "weights": 2.5},
    notes=["max_num_seqs is 256, not 300."],
)


def server(**changes: object) -> ServerSettings:
    plain = ServerSettings(served_model_names=("smollm2-135m-instruct",), model_path="smollm2-135m-instruct")
    return msgspec.structs.replace(plain, **changes)


def test_the_start_prints_the_lines_that_guides_look_for() -> None:
    lines = block_lines(INFO, EngineSettings(model="m"))
    for line in (
        "GPU memory utilization: 0.90",
        "Available KV cache memory: 4.00 GiB",
        "KV cache size: 2912 blocks",
        "GPU KV cache size: 93,184 tokens",
        "Maximum concurrency for 8,192 tokens per request: 11.38x",
    ):
        assert line in lines
    text = "\n".join(lines)
    for said in ("1.50 GiB", "AVX2, 2 threads", "3.5 s: device 1.0 s, weights 2.5 s", "Note: max_num_seqs is 256"):
        assert said in text


@pytest.mark.parametrize(("share", "shown"), [(0.9, "0.90"), (0.01, "0.01"), (0.001, "0.001"), (1.0, "1.00")])
def test_a_small_share_of_the_memory_is_not_shown_as_none(share: float, shown: str) -> None:
    lines = block_lines(INFO, EngineSettings(model="m", gpu_memory_utilization=share))
    assert f"GPU memory utilization: {shown}" in lines


def test_piped_output_is_plain() -> None:
    out = io.StringIO()
    print_block(INFO, EngineSettings(model="m"), out)
    assert out.getvalue().splitlines() == block_lines(INFO, EngineSettings(model="m"))


def test_a_terminal_gets_the_same_lines() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    print_block(INFO, EngineSettings(model="m"), out)
    assert "GPU KV cache size: 93,184 tokens" in out.getvalue()
    assert "11.38x" in out.getvalue()


@pytest.mark.parametrize(
    ("changes", "url"),
    [
        ({}, "http://127.0.0.1:8000/v1"),
        ({"host": "0.0.0.0"}, "http://127.0.0.1:8000/v1"),
        ({"host": "::", "port": 81}, "http://[::1]:81/v1"),
        ({"host": "::1"}, "http://[::1]:8000/v1"),
        ({"host": "box.example", "ssl_certfile": "c", "ssl_keyfile": "k"}, "https://box.example:8000/v1"),
        ({"root_path": "/llm"}, "http://127.0.0.1:8000/llm/v1"),
    ],
)
def test_the_base_url_is_one_that_works_here(changes: dict[str, object], url: str) -> None:
    assert base_url(server(**changes)) == url


def test_a_start_ends_with_url_name_and_room() -> None:
    text = "\n".join([*access_lines(server(), "http://127.0.0.1:8000/v1"), room_line(INFO)])
    for said in (
        "Base URL: http://127.0.0.1:8000/v1",
        "Model: smollm2-135m-instruct",
        "93,184 tokens",
        "11.4 requests",
    ):
        assert said in text


def test_listening_beyond_loopback_without_a_key_is_said() -> None:
    assert "set --api-key" in "\n".join(access_lines(server(host="0.0.0.0"), "u"))
    closed = server(host="0.0.0.0", api_keys=("sk-secret",))
    text = "\n".join([*access_lines(closed, "u"), *example_lines(closed, "u")])
    assert "set --api-key" not in text
    assert "sk-secret" not in text
    assert "Bearer YOUR_KEY" in text


def test_the_examples_survive_a_name_with_quotes(tmp_path: Path) -> None:
    name = 'it\'s "mine"'
    lines = example_lines(server(served_model_names=(name,)), "http://127.0.0.1:1/v1")
    (curl,) = (line for line in lines if line.startswith("curl "))
    words = subprocess.run(
        ["bash", "-c", 'curl() { printf "%s\\n" "$@"; }; ' + curl], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert json.loads(words[-1])["model"] == name
    code = lines[lines.index("from openai import OpenAI") :]
    compile("\n".join(code), "example", "exec")


@pytest.mark.parametrize(
    ("command", "package", "extra"), [("up", "sqlalchemy", "gateway"), ("gateway", "sqlalchemy", "gateway")]
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    tmp_path: Path, command: str, package: str, extra: str
) -> None:
    code = (
        "import sys; sys.modules[sys.argv[1]] = None\n"
        "from headrace.cli.main import main; sys.exit(main([sys.argv[2], '--data-dir', sys.argv[3]]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, package, command, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1
    assert f"needs the package {package}" in result.stderr
    assert f"headrace[{extra}]" in result.stderr
    assert "Traceback" not in result.stderr
