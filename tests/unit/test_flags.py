"""The flag table against the documents: every flag people use is known, and the guides' commands mean what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.flag_help import flags_markdown
from headrace.config.command_line import parse_command_line
from headrace.config.flag_table import FLAG_BY_NAME, FLAGS
from headrace.config.flags import is_short
from headrace.config.load import LaunchError, settings
from headrace.config.settings import EngineSettings, ServerSettings

ROOT = Path(__file__).parents[2]
SEEDS = ROOT / "tests/data/seeds"

FLAGS_OF_GUIDES = """
--model m | --served-model-name n | --host 0.0.0.0 | --port 8000 | --tensor-parallel-size 1
--gpu-memory-utilization 0.9 | --max-model-len 8192 | --enable-chunked-prefill | --max-num-batched-tokens 4096
--enable-prefix-caching | --quantization awq | --dtype half | --max-num-seqs 8 | --kv-cache-dtype auto
--api-key sk-your-local-vllm-key | --swap-space 8 | --cpu-offload-gb 4 | --block-size 16 | --enforce-eager
--trust-remote-code | --disable-custom-all-reduce | --disable-log-requests | --uvicorn-log-level warning
--load-format safetensors
"""

FLAGS_GONE_ELSEWHERE = """
--swap-space 4 | --disable-log-requests | --num-scheduler-steps 8 | --multi-step-stream-outputs
--preemption-mode swap | --scheduler-delay-factor 0.5 | --num-lookahead-slots 2 | --max-seq-len-to-capture 8192
--guided-decoding-backend xgrammar | --guided-decoding-disable-fallback | --guided-decoding-disable-any-whitespace
--guided-decoding-disable-additional-properties | --enable-reasoning | --enable-prompt-adapter | --task generate
--device cuda | --rope-scaling {"rope_type":"yarn","factor":4.0} | --rope-theta 1000000 | --tokenizer-pool-size 2
--disable-async-output-proc | --qlora-adapter-name-or-path x | --logits-processor-pattern x
--lora-extra-vocab-size 256 | --max-num-partial-prefills 2 | --max-long-partial-prefills 1 | --calculate-kv-scales
--disable-frontend-multiprocessing
"""

FLAGS_NEW_ELSEWHERE = """
--kv-cache-memory-bytes 2G | --max-num-queued-reqs 64 | --max-num-queued-tokens 100000 | --scheduler-reserve-full-isl
--long-prefill-token-threshold 2048 | --stream-interval 2 | --async-scheduling | --kv-offloading-size 8
--optimization-level 2 | -O0 | -O3 | -O 1 | --spec-method ngram | --spec-model x | --spec-tokens 4 | --dry-run
--shutdown-timeout 30 | --logprobs-mode raw_logprobs | --max-model-len auto | --max-model-len -1
--device-memory-utilization 0.8 | --custom-histogram-buckets 1,2 | --per-request-metrics
"""

FLAGS_OF_EVERY_DAY = """
-tp2 | -pp1 | -cc.level=3 | -cc.level 3 | --compilation-config.level 3 | --limit-mm-per-prompt.image 2 | -cc 3
-tp 1 | -pp 1 | -dp 1 | -q awq | --tokenizer t | --revision main | --download-dir d | --hf-overrides {"a":1}
--override-generation-config {"temperature":0.5} | --allowed-origins ["*"] | --allowed-methods ["GET"]
--allowed-headers ["*"] | --ssl-keyfile k | --ssl-certfile c | --root-path /x | --disable-log-stats
--max-log-len 100 | --enable-auto-tool-choice | --tool-call-parser hermes | --reasoning-parser deepseek_r1
--enable-lora | --lora-modules a=b c=d | --speculative-config {"method":"ngram"} | --enable-log-requests
--pipeline-parallel-size 1 | --data-parallel-size 1 | --tokenizer-mode auto | --limit-mm-per-prompt image=2
--limit-mm-per-prompt {"image":2} | --distributed-executor-backend mp | --disable-fastapi-docs
--response-role assistant | --chat-template-content-format auto | --enable-prompt-tokens-details
--kv-transfer-config {"kv_role":"kv_both"} | --enable-expert-parallel | --compilation-config {"level":3}
--scheduling-policy priority | --generation-config vllm | --chat-template t.jinja | --seed 42 | --max-logprobs 20
--max-loras 4 | --max-lora-rank 64 | --max-cpu-loras 8 | --enable-sleep-mode | --data-parallel-size-local 1
--data-parallel-address 10.0.0.1 | --data-parallel-rpc-port 13345 | --headless | --api-server-count 2
--num-gpu-blocks-override 100 | --otlp-traces-endpoint http://x | --max-parallel-loading-workers 2
--no-enable-prefix-caching | --no-enable-chunked-prefill | --enable-chunked-prefill=False
--enable-chunked-prefill false | --disable-uvicorn-access-log | --model-impl auto | --code-revision x
--tokenizer-revision x | --config-format hf | --ignore-patterns a b | --attention-backend FLASH_ATTN
--middleware a.b | --enable-request-id-headers | --enable-force-include-usage | --uds /tmp/s
--disable-sliding-window | --enable-eplb | --nnodes 1 | --node-rank 0 | --structured-outputs-config {"backend":"auto"}
--hf-token hf_x | --runner generate | --convert none | --mm-processor-kwargs {"a":1} | --disable-cascade-attn
--worker-cls auto | --prefix-caching-hash-algo sha256 | --use-v2-block-manager | --speculative-model x
"""


def written_flags(*texts: str) -> list[str]:
    return [flag.strip() for text in texts for line in text.splitlines() for flag in line.split(" | ") if flag.strip()]


@pytest.mark.parametrize(
    "written", written_flags(FLAGS_OF_GUIDES, FLAGS_GONE_ELSEWHERE, FLAGS_NEW_ELSEWHERE, FLAGS_OF_EVERY_DAY)
)
def test_a_flag_people_use_parses(written: str) -> None:
    given = parse_command_line(written.split())
    assert given.errors == []
    assert len(given.values) == 1


@pytest.mark.parametrize("written", written_flags(FLAGS_OF_GUIDES, FLAGS_GONE_ELSEWHERE))
def test_a_flag_of_guides_has_its_effect_or_says_what_happens(written: str) -> None:
    given = parse_command_line(written.split())
    (name,) = given.values
    flag = FLAG_BY_NAME[name]
    if flag.state == "real":
        assert not given.notices() and not given.refusals()
    elif not flag.is_harmless(given.values[name]):
        (line,) = given.notices() + given.refusals()
        assert line.startswith(given.spelled[name])
        assert "\n" not in line


REFUSED = {
    "--tensor-parallel-size 4": "Tensor parallelism",
    "-tp 2": "Tensor parallelism",
    "-pp 2": "Pipeline parallelism",
    "-dp 2": "Data-parallel replicas",
    "--enable-lora": "LoRA",
    "--lora-modules a=b": "LoRA",
    "--tool-parser-plugin x.py": "plugins",
    "--speculative-config {}": "Speculative decoding",
    "--kv-transfer-config {}": "Disaggregated prefill",
    "--distributed-executor-backend ray": "Ray",
    "--enable-expert-parallel": "Expert parallelism",
    "--cpu-offload-gb 4": "Keeping weights in host memory",
    "--async-scheduling": "Asynchronous scheduling",
}


@pytest.mark.parametrize(("written", "feature"), REFUSED.items())
def test_a_feature_that_is_not_built_is_refused_by_name(written: str, feature: str) -> None:
    with pytest.raises(LaunchError, match=feature) as caught:
        settings(parse_command_line(written.split()))
    (line,) = caught.value.errors
    assert line.startswith(written) and "not built yet" in line


@pytest.mark.parametrize(
    "written",
    written_flags(
        "-tp 1 | -pp 1 | -dp 1 | --cpu-offload-gb 0 | --no-enable-lora | --task generate | --stream-interval 1",
        "--distributed-executor-backend mp | --no-async-scheduling | --response-role assistant | --nnodes 1",
    ),
)
def test_a_value_that_asks_for_nothing_is_fine(written: str) -> None:
    given = parse_command_line(written.split())
    assert given.errors == given.refusals() == given.notices() == []


UNKNOWN = {
    "--max-modle-len": "--max-model-len",
    "--gpu-memory-utilisation": "--gpu-memory-utilization",
    "--enable_prefix_cachin": "--enable-prefix-caching",
    "--no-enable-prefix-cache": "--no-enable-prefix-caching",
    "--tensor-paralel-size": "--tensor-parallel-size",
    "--max-num-sequences": "--max-num-seqs",
    "-port": "--port",
}


@pytest.mark.parametrize(("written", "nearest"), UNKNOWN.items())
def test_an_unknown_flag_names_the_nearest(written: str, nearest: str) -> None:
    given = parse_command_line([written, "5"])
    assert given.errors == [f"unknown flag {written}. Did you mean {nearest}?"]


def test_a_flag_like_no_other_points_to_the_help() -> None:
    assert parse_command_line(["--xyzzy"]).errors == ["unknown flag --xyzzy. `headrace serve --help` lists the flags."]


BAD_VALUES = {
    "--port abc": "--port abc: not a whole number.",
    "--port 70000": "--port 70000: must be between 0 and 65535.",
    "--max-num-seqs 0": "--max-num-seqs 0: must be 1 or more.",
    "--dtype flaot16": "choose one of auto, float32, float16, bfloat16 (did you mean float16?)",
    "--max-model-len 8q": "not a size; write 8192, 8k (8,000) or 8K (8,192).",
    "--max-model-len 0": "must be 2 or more",
    "--max-model-len 1": "must be 2 or more",
    "--max-model-len 1e999999999": "larger than any machine holds",
    "--max-num-seqs 99999999999999999999": "larger than any machine holds",
    "--kv-cache-memory-bytes 1.5": "not a whole number",
    "--kv-cache-memory-bytes -2G": "must be 1 or more",
    "--hf-overrides {a}": "not valid JSON",
    "--hf-overrides 5": "must be a JSON object",
    "--allowed-origins [1]": "must be a JSON list of strings",
    "--enable-prefix-caching=maybe": "say true or false",
    "--gpu-memory-utilization nan": "not a finite number",
    "--quantization awk": "did you mean awq?",
    "--port": "--port needs a value.",
    "--max-model-len --port 3": "--max-model-len needs a value, such as --max-model-len 8192.",
}


@pytest.mark.parametrize(("written", "said"), BAD_VALUES.items())
def test_a_bad_value_says_what_is_allowed(written: str, said: str) -> None:
    (line,) = parse_command_line(written.split()).errors
    assert said in line


@pytest.mark.parametrize(
    ("written", "tokens"),
    [("8192", 8192), ("8k", 8000), ("8K", 8192), ("25.6k", 25600), ("1,024", 1024), ("auto", None), ("-1", None)],
)
def test_sizes_are_read_as_people_write_them(written: str, tokens: int | None) -> None:
    assert settings(parse_command_line(["--max-model-len", written]))[0].max_model_len == tokens


@pytest.mark.parametrize(
    ("written", "size"), [("2G", 2 << 30), ("2g", 2 * 10**9), ("1.5GiB", 3 << 29), ("512M", 512 << 20), ("4096", 4096)]
)
def test_bytes_are_read_as_people_write_them(written: str, size: int) -> None:
    assert settings(parse_command_line([f"--kv_cache_memory_bytes={written}"]))[0].kv_cache_memory_bytes == size


def test_spellings_of_a_flag_are_one() -> None:
    for words in (["--max-num-seqs", "7"], ["--max_num_seqs", "7"], ["--max-num-seqs=7"], ["--max_num_seqs=7"]):
        assert settings(parse_command_line(words))[0].max_num_seqs == 7
    assert settings(parse_command_line(["--device-memory-utilization", "0.5"]))[0].gpu_memory_utilization == 0.5


def test_several_names_and_keys_are_taken() -> None:
    words = ["m", "--served-model-name", "a", "b", "--api-key", "k1", "--api-key", "k2", "--port", "1"]
    server = settings(parse_command_line(words))[1]
    assert server.served_model_names == ("a", "b")
    assert server.api_keys == ("k1", "k2")


def test_what_is_named_twice_is_taken_once_for_every_flag_of_several_values() -> None:
    for flag in FLAGS:
        if flag.many:
            words = ["3", "4", "3"]
            value = parse_command_line([flag.option, *words, flag.option, "4"]).values[flag.name]
            assert [str(part) for part in value] == ["3", "4"], flag.name  # type: ignore[attr-defined]


def test_a_number_of_none_is_no_number_of_parts_for_any_flag() -> None:
    for flag in FLAGS:
        if flag.state == "refused" and flag.kind == "int" and 1 in flag.harmless:
            for text in ("0", "-1"):
                errors = parse_command_line([flag.option, text]).errors
                assert errors == [f"{flag.option} {text}: must be 1 or more."]


def test_lists_are_taken_in_both_forms() -> None:
    for words in (["--allowed-origins", '["https://a", "https://b"]'], ["--allowed-origins", "https://a", "https://b"]):
        assert settings(parse_command_line(words))[1].allowed_origins == ("https://a", "https://b")


def test_a_switch_can_be_turned_off_in_every_way() -> None:
    for words in (
        ["--no-enable-chunked-prefill"],
        ["--enable-chunked-prefill", "False"],
        ["--enable-chunked-prefill=0"],
    ):
        assert settings(parse_command_line(words))[0].enable_chunked_prefill is False
    assert settings(parse_command_line(["--disable-log-stats"]))[1].log_stats is False


def test_half_is_float16_and_float_is_float32() -> None:
    assert settings(parse_command_line(["--dtype", "half"]))[0].dtype == "float16"
    assert settings(parse_command_line(["--dtype", "float"]))[0].dtype == "float32"


def test_milliseconds_become_seconds() -> None:
    assert settings(parse_command_line(["--step-time-target-ms", "80"]))[0].step_time_target_s == pytest.approx(0.08)


def test_rotary_flags_become_overrides() -> None:
    words = ["--rope-theta", "500000", "--hf-overrides.max_position_embeddings", "16384"]
    assert settings(parse_command_line(words))[0].hf_overrides == {
        "max_position_embeddings": 16384,
        "rope_theta": 500000.0,
    }


def test_a_nested_value_is_set_by_its_path() -> None:
    words = ["--hf-overrides.rope_scaling.factor", "2.0", "--hf-overrides.rope_scaling.rope_type", "linear"]
    assert settings(parse_command_line(words))[0].hf_overrides == {
        "rope_scaling": {"factor": 2.0, "rope_type": "linear"}
    }


def test_every_flag_of_json_can_be_given_value_by_value_in_every_spelling() -> None:
    for flag in FLAGS:
        for spelling in flag.spellings if flag.takes_json else ():
            words = [f"{spelling}.a.b", "1", f"{spelling}.a.c=x", f"{spelling}.d+", "2", f"{spelling}.d+=y"]
            given = parse_command_line(words)
            assert given.errors == []
            assert given.values == {flag.name: {"a": {"b": 1, "c": "x"}, "d": [2, "y"]}}


def test_only_flags_of_json_have_values_inside() -> None:
    for flag in FLAGS:
        if not flag.takes_json:
            (line,) = parse_command_line([f"{flag.option}.a", "1"]).errors
            assert line.startswith(f"unknown flag {flag.option}.a.")


def test_a_number_may_follow_a_short_flag_at_once() -> None:
    for flag in FLAGS:
        for name in flag.aliases:
            if is_short(name) and flag.kind == "int":
                given = parse_command_line([f"-{name}3", "model"])
                assert (given.errors, given.values, given.positional) == ([], {flag.name: 3}, "model")
    assert parse_command_line(["-zz3"]).errors[0].startswith("unknown flag -zz3.")


def test_the_model_is_taken_in_both_forms_but_only_one_of_them() -> None:
    assert settings(parse_command_line(["m"]))[0].model == "m"
    assert settings(parse_command_line(["--model", "m"]))[1].served_model_names == ("m",)
    assert settings(parse_command_line(["m", "--model", "m"]))[0].model == "m"
    with pytest.raises(LaunchError, match="two models are named, a and --model b"):
        settings(parse_command_line(["a", "--model", "b"]))
    assert settings(parse_command_line([]))[1].served_model_names == ("smollm2-135m-instruct",)


def test_every_mistake_is_told_at_once() -> None:
    errors = parse_command_line(["--port", "x", "--bogus", "--dtype", "y", "a", "b"]).errors
    assert len(errors) == 4


def test_a_key_is_not_repeated_in_messages() -> None:
    given = parse_command_line(["--api-key", "sk-secret", "--hf-token", "hf_secret"])
    assert "secret" not in " ".join([*given.spelled.values(), *given.refusals(), *given.notices()])


def test_defaults_of_the_table_are_those_of_the_settings() -> None:
    engine, server = settings(parse_command_line([]))
    assert engine == EngineSettings(model="smollm2-135m-instruct")
    assert server == ServerSettings(served_model_names=("smollm2-135m-instruct",), model_path="smollm2-135m-instruct")


def test_every_row_of_the_table_is_complete() -> None:
    for flag in FLAGS:
        assert flag.help.endswith("."), flag.name
        assert flag.state == "real" or flag.note, flag.name
        assert "\n" not in flag.help + flag.note, flag.name


def test_the_page_of_flags_is_up_to_date() -> None:
    assert (ROOT / "docs/flags.md").read_text(encoding="utf-8") == flags_markdown(), (
        "run: python -m headrace.cli.flag_help > docs/flags.md"
    )


# The guides' own commands


def seed_words(name: str, tmp_path: Path) -> list[str]:
    """The words that the shell hands to the server, the script's variables filled in."""
    printer = tmp_path / "python"
    printer.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n')
    printer.chmod(0o755)
    (tmp_path / "python3").symlink_to(printer)
    result = subprocess.run(
        ["bash", str(SEEDS / name)],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    words = result.stdout.splitlines()
    assert words[:2] == ["-m", "vllm.entrypoints.openai.api_server"]
    return words[2:]


def seed_values(name: str, tmp_path: Path) -> tuple[EngineSettings, ServerSettings, list[str], list[str]]:
    given = parse_command_line(seed_words(name, tmp_path))
    assert given.errors == []
    refusals, notices = given.refusals(), given.notices()
    given.values = {key: value for key, value in given.values.items() if key != "tensor-parallel-size"}
    engine, server = settings(given)
    return engine, server, refusals, notices


def test_guide_command_a070(tmp_path: Path) -> None:
    engine, server, refusals, notices = seed_values("a070.sh", tmp_path)
    assert engine == EngineSettings(
        model="Qwen/Qwen2.5-7B-Instruct", quantization="awq", max_model_len=8192, max_num_batched_tokens=4096
    )
    assert (server.host, server.port, server.served_model_names) == ("0.0.0.0", 8000, ("qwen2.5-7b",))
    assert refusals == notices == []


def test_guide_command_a071(tmp_path: Path) -> None:
    engine, server, refusals, notices = seed_values("a071.sh", tmp_path)
    assert engine == EngineSettings(
        model="/data/models/Qwen2-7B-Instruct-AWQ",
        quantization="awq",
        dtype="float16",
        max_model_len=8192,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        gpu_memory_utilization=0.92,
        kv_cache_dtype="fp8_e5m2",
    )
    assert server.api_keys == ("sk-your-local-vllm-key",)
    assert server.served_model_names == ("/data/models/Qwen2-7B-Instruct-AWQ",)
    assert refusals == notices == []


def test_guide_command_a072(tmp_path: Path) -> None:
    engine, server, refusals, notices = seed_values("a072.sh", tmp_path)
    assert (engine.max_num_seqs, engine.max_model_len, engine.kv_cache_dtype) == (128, 4096, "auto")
    assert (server.host, server.served_model_names) == ("127.0.0.1", ("qwen2.5-7b-awq",))
    assert refusals == []
    assert engine.swap_space_bytes == 8 << 30
    assert [line.split(":")[0] for line in notices] == ["--disable-log-requests"]


def test_swap_space_is_in_gib_under_its_old_name_and_its_new_one() -> None:
    for written, expected in (("--swap-space 0.5", 1 << 29), ("--kv-offloading-size 2", 2 << 30), ("", None)):
        engine, _ = settings(parse_command_line(written.split()))
        assert engine.swap_space_bytes == expected
    for written in ("--swap-space=-1", "--max-num-queued-tokens 0"):
        with pytest.raises(LaunchError, match=written.split("=")[0].split()[0]):
            settings(parse_command_line(written.split()))
    engine, _ = settings(parse_command_line(["--max-num-queued-tokens", "100k"]))
    assert engine.max_num_queued_tokens == 100_000


def test_guide_command_a073(tmp_path: Path) -> None:
    engine, _, refusals, notices = seed_values("a073.sh", tmp_path)
    assert engine == EngineSettings(model="xxx")
    assert refusals == notices == []


@pytest.mark.parametrize("name", ["a074.sh", "a075.sh"])
def test_guide_commands_of_eight_cards(name: str, tmp_path: Path) -> None:
    engine, server, refusals, notices = seed_values(name, tmp_path)
    assert engine == EngineSettings(
        model="/models/Qwen2.5-72B-Instruct",
        dtype="float16",
        gpu_memory_utilization=0.95,
        max_model_len=32768,
        max_num_seqs=2,
        max_num_batched_tokens=32768,
        swap_space_bytes=1 << 30 if name == "a074.sh" else None,
    )
    assert server.served_model_names == ("Qwen2.5-72B-Instruct",)
    assert refusals == ["--tensor-parallel-size 8: Tensor parallelism: not built yet; use --tensor-parallel-size 1."]
    mapped = ["--disable-custom-all-reduce"] if name == "a074.sh" else []
    assert sorted(line.split(":")[0] for line in notices) == sorted([*mapped, "--trust-remote-code"])


def test_help_needs_neither_arrays_nor_the_engine() -> None:
    code = (
        "import sys; from headrace.cli.main import main; main(['serve', '--help']); "
        "heavy = {'numpy', 'torch', 'msgspec', 'rich', 'yaml', 'uvicorn', 'tokenizers'} & set(sys.modules); "
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "Choose the model:" in result.stdout and "--gpu-memory-utilization X" in result.stdout
