"""`python -m headrace.entrypoints.openai.api_server`, as vLLM's commands are written."""
