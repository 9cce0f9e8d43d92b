"""Signatures of thinking on their way through a dialect that did not make them.

A signature is worth something only to who made it: Anthropic's `signature`, OpenAI's `encrypted_content`. In the
other's field it has its maker's name in front, so that a conversation may change upstreams and come back:

    Anthropic says "EqQB..."  ->  a responses client holds "messages.EqQB..."  ->  Anthropic gets "EqQB..."
"""

from __future__ import annotations

from typing import Literal

Signer = Literal["messages", "responses"]


def signer_of(signature: object, native: Signer) -> tuple[Signer | None, str | None]:
    """Who signed, and the bare signature, from a client that speaks `native`. (None, None) for no signature."""
    if not isinstance(signature, str) or not signature:
        return None, None
    other: Signer = "responses" if native == "messages" else "messages"
    if signature.startswith(f"{other}."):
        return other, signature.removeprefix(f"{other}.")
    return native, signature


def signed_for(signature: str | None, signer: str, client: Signer) -> str | None:
    """The signature as a client that speaks `client` is to keep it."""
    return signature if signature is None or signer == client else f"{signer}.{signature}"
