"""The bundled model's greedy answers are transformers' own, on the same dequantised weights in float32.

Ours are generated in one batch through the runner. Transformers then reads prompt and answer at once: if the
largest logit at every place is our next token, its own greedy search would have given the same answer.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from gguf.constants import GGMLQuantizationType  # noqa: E402
from gguf.quants import dequantize  # noqa: E402

from headrace.config.model_files import ModelFiles, open_model  # noqa: E402
from headrace.engine.plan import NewSequence, Plan, SequenceStep  # noqa: E402
from headrace.kernels.native import NativeKernels  # noqa: E402
from headrace.protocol.ipc import SamplingParams  # noqa: E402
from headrace.runtime.runner import Runner  # noqa: E402
from headrace.text.tokenizer import Tokenizer  # noqa: E402
from headrace.weights.checkpoint import Checkpoint  # noqa: E402
from tests.small_models import bundled_gguf  # noqa: E402

NUM_TOKENS, BLOCK_SIZE = 48, 16

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain photosynthesis to a child.",
    "List three prime numbers.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "def fibonacci(n):",
    "What is 12 times 11?",
    "Who wrote Hamlet?",
)

pytestmark = pytest.mark.timeout(600)
TEXTS = (
    "The",
    "Once upon a time, in a village by the sea,",
    "1, 1, 2, 3, 5, 8,",
    "import numpy as np\n\ndef",
    "Dear Sir or Madam,\n\nI am writing to",
    "中国的首都是",
    "Die Hauptstadt von Deutschland ist",
    "SELECT name FROM users WHERE",
    "Q: How many legs does a spider have?\nA:",
    "<html>\n<head>\n<title>",
    "To be, or not to be, that is",
    "🙂🙂🙂",
    "ALL CAPS ARE LOUD. THEY",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "    if x > 0:\n        return",
    "Abstract. We propose a method for",
    "Roses are red,\nviolets are blue,",
    "0123456789" * 10,
    "\n\n\n",
    "In 1969, the first man on the moon",
)


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return open_model(bundled_gguf())


@pytest.fixture(scope="module")
def prompts(files: ModelFiles) -> list[list[int]]:
    tokenizer = Tokenizer.load(files)
    chats = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    return [tokenizer.encode(text, False) for text in (*chats, *TEXTS)]


@pytest.fixture(scope="module")
def answers(files: ModelFiles, prompts: list[list[int]]) -> list[list[int]]:
    """48 greedy tokens for each prompt: all in one batch, prompts in one step, then 47 steps of one token each."""
    runner = Runner(files, NativeKernels("float32", 2))
    runner.load(max_positions=512)
    blocks_each = -(-(max(map(len, prompts)) + NUM_TOKENS) // BLOCK_SIZE)
    runner.allocate_kv_cache(len(prompts) * blocks_each, BLOCK_SIZE)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    new = tuple(NewSequence(i, tuple(ids), len(ids), 0, params) for i, ids in enumerate(prompts))

    def plans() -> Iterator[Plan]:
        blocks = [tuple(range(i * blocks_each, (i + 1) * blocks_each)) for i in range(len(prompts))]
        first = (SequenceStep(i, 0, len(ids), (blocks[i],), True) for i, ids in enumerate(prompts))
        yield Plan(0, (), new, (), tuple(first))
        for done in range(1, NUM_TOKENS):
            steps = (SequenceStep(i, len(ids) + done - 1, 1, ((),), True) for i, ids in enumerate(prompts))
            yield Plan(done, (), (), (), tuple(steps))

    generated: list[list[int]] = [[] for _ in prompts]
    for plan in plans():
        for sampled in runner.execute(plan).sampled:
            generated[sampled.seq_id] += sampled.token_ids
    return generated


def oracle(files: ModelFiles) -> torch.nn.Module:
    """Transformers' Llama with the weights the file holds, read by the gguf package's own dequantiser, its rows
    of q and k turned back as transformers' GGUF import does."""
    config = files.config
    raw = np.memmap(files.path, np.uint8, mode="r")
    checkpoint, state = Checkpoint(files), {}
    for name, info in files.tensors.items():
        stored = raw[info.offset : info.offset + info.num_bytes].reshape(info.shape[0], -1)
        values = dequantize(np.array(stored), GGMLQuantizationType[info.dtype]).reshape(info.shape)
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        if heads is not None:
            values = values.reshape(heads, config.head_dim // 2, 2, -1).swapaxes(1, 2).reshape(info.shape)
        ours = checkpoint.matrix(name).to_float32() if len(info.shape) == 2 else checkpoint.vector(name)
        np.testing.assert_array_equal(ours, values, err_msg=name)
        state[name] = torch.from_numpy(np.ascontiguousarray(values))
    hf_config = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_theta,
        tie_word_embeddings=True,
    )
    assert hf_config.rope_parameters["rope_theta"] == config.rope_theta
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(hf_config)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(hf_config)
    return model.eval()


def test_30_greedy_answers_of_48_tokens_equal_transformers(
    files: ModelFiles, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    assert len(prompts) == 30 and all(len(answer) == NUM_TOKENS for answer in answers)
    assert len({tuple(answer) for answer in answers}) > 25, "the prompts are not varied"
    assert "Paris" in Tokenizer.load(files).decode(answers[0])
    model = oracle(files)
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer[:-1]]), logits_to_keep=NUM_TOKENS).logits[0]
        assert logits.argmax(-1).tolist() == answer
