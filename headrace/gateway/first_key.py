"""What a start says about keys: the first one in full, this once; later how to find one and how to make another."""

from __future__ import annotations

from headrace.gateway.keys import KeyStore


def first_key_lines(store: KeyStore) -> list[str]:
    """Make a key if there is none, and the lines to print, the key on a line of its own. Blocks."""
    record, secret = store.first()
    if secret is not None:
        return [
            f"Made the key `{record.name}`. It is shown this once; keep it in a safe place:",
            "",
            f"  {secret}",
            "",
            "Another one: headrace key create NAME",
        ]
    state = record.state(store.now_s())
    if state != "active":
        return [f"No key works: `{record.name}` ({record.shown}) is {state}. Make one: headrace key create NAME"]
    return [f"Key: `{record.name}` ({record.shown}), shown in full when it was made. New: headrace key create NAME"]
