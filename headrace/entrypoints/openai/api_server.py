"""`python -m headrace.entrypoints.openai.api_server --model MODEL ...`: `headrace serve` under the name that
commands written for vLLM use, so that replacing one word is enough."""

from __future__ import annotations

import sys

from headrace.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
