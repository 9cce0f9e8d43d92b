"""Translators between OpenAI chat completions, Anthropic messages and OpenAI responses.

`translator.py` holds what a server calls. Each dialect has three files beside it: `*_request.py` (read, write),
`*_reader.py` (its answers into events) and `*_writer.py` (events into its answers); `conversation.py` and
`events.py` are the two values in the middle, and every pair of dialects is one reader and one writer.
"""
