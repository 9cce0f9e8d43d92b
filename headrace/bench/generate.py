"""`python -m headrace.bench.generate`: transformers' own `generate` under W1 to W3, without a server, as a peer.

Batches of as many requests as a load has streams, one after another, prompts padded on the left. In bfloat16 where the
CPU multiplies it, else in float32, which is faster there. It has no server, so no time to first token is reported.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

import psutil

from headrace.bench.workloads import REQUESTS
from headrace.planner.cpu import cpu_flags


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace.bench.generate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--load", required=True, choices=sorted(REQUESTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(argv)

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(args.threads)
    dtype = torch.bfloat16 if "avx512_bf16" in cpu_flags() else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    requests, streams = REQUESTS[args.load](args.seed)

    def batch(prompts: list[str], num_tokens: int) -> int:
        inputs = tokenizer(prompts, return_tensors="pt", padding=True)
        with torch.inference_mode():
            out = model.generate(
                **inputs, do_sample=False, min_new_tokens=num_tokens, max_new_tokens=num_tokens,
                pad_token_id=tokenizer.pad_token_id,
            )  # fmt: skip
        return int(out.shape[0] * (out.shape[1] - inputs["input_ids"].shape[1]))

    batch([requests[0].prompt], 4)
    started_s, tokens = time.perf_counter(), 0
    for first in range(0, len(requests), streams):
        part = requests[first : first + streams]
        tokens += batch([request.prompt for request in part], part[0].max_tokens)
    rate = tokens / (time.perf_counter() - started_s)
    print(
        json.dumps({"output tok/s": rate, "errors": 0, "PSS MiB": psutil.Process().memory_full_info().pss / (1 << 20)})
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
