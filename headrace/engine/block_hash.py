"""Names for the content of full KV blocks: a chain of digests, so that equal names mean equal prefixes.

The keys and values in a block depend on every token before it, not only on its own. Each block's digest is
therefore taken over (digest of the block before, own tokens), and the chain starts at the domain's digest:

    root = H(domain)    key 0 = H(root, tokens 0..15)    key 1 = H(key 0, tokens 16..31)    ...
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

DIGEST_BYTES = 16


class BlockKey(NamedTuple):
    """What a full block holds. `parent` and `tokens` are kept so that a hit is compared, not trusted."""

    digest: bytes
    parent: bytes
    tokens: bytes


def domain_digest(parts: Iterable[str]) -> bytes:
    """Root of a chain. Sequences share blocks only within one domain (cache salt; later adapter and images)."""
    root = blake2b(digest_size=DIGEST_BYTES, person=b"domain")
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        root.update(len(encoded).to_bytes(8, "little"))
        root.update(encoded)
    return root.digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> BlockKey:
    """Key of a full block whose predecessor has digest `parent`; token ids must fit 32 bits."""
    tokens = array("I", token_ids).tobytes()
    return BlockKey(blake2b(parent + tokens, digest_size=DIGEST_BYTES, person=b"block").digest(), parent, tokens)
