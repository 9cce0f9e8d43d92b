"""A CPU serves without torch: nothing on the way from the flags to the tokens imports it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.tiny_models import tiny_llama

PROGRAM = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"{name} is not to be imported", name=name)

sys.meta_path.insert(0, Refused())
from headrace.config.settings import EngineSettings
from headrace.core import EngineCore
from headrace.protocol.ipc import AddRequest, SamplingParams
import headrace.cli.serve, headrace.cli.up, headrace.server.run, headrace.llm

core = EngineCore(EngineSettings(model=sys.argv[1], device="cpu", threads=1, kv_cache_memory_bytes=4 << 20))
params = SamplingParams(max_tokens=5, temperature=0.7, seed=3)
core.add(AddRequest(request_id="r", token_ids=[1, 2, 3], params=params, arrival_s=0.0))
tokens = []
while core.has_work:
    tokens += [t for output in core.step().outputs for t in output.token_ids]
print(core.info.kernels, len(tokens))
"""


def test_a_cpu_serves_where_there_is_no_torch(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["native", "5"]), done.stderr


OTHER = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from headrace.cli.main import main
sys.exit(main(["serve", sys.argv[1], "--dry-run", *sys.argv[2:]]))
"""


def test_a_family_that_needs_torch_is_named_with_those_that_do_not(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["WaterwheelForCausalLM"]}))
    for words, said in (
        ([], "are not installed: pip install torch transformers."),
        (["--kernels", "native"], "--kernels native cannot work: WaterwheelForCausalLM runs in transformers' code"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", OTHER, str(model), *words], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert "WaterwheelForCausalLM" in line and said in line
        assert "llama, mistral, mixtral, qwen2, qwen3" in line
