python -m vllm.entrypoints.openai.api_server --model xxx
