"""How the numbers of the KV cache are held, by the names of `--kv-cache-dtype`: what one takes in bytes.

An 8-bit number is a value divided by the float32 scale of its token and KV head, one for the key and one for the
value: scale = largest magnitude / largest number of the type. So a token's bits depend on nothing but the token.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCacheFormat:
    value_bytes: int
    largest: float | None = None
    """The type's largest number, None where no scale is kept."""

    def head_bytes(self, head_dim: int) -> int:
        """Of one token's key, or value, in one KV head."""
        return head_dim * self.value_bytes + (0 if self.largest is None else 4)


KV_CACHE_FORMATS = {
    "float32": KVCacheFormat(4),
    "bfloat16": KVCacheFormat(2),
    "float16": KVCacheFormat(2),
    "fp8_e4m3": KVCacheFormat(1, 448.0),
    "fp8_e5m2": KVCacheFormat(1, 57344.0),
    "int8": KVCacheFormat(1, 127.0),
}


def kv_cache_dtype(asked: str, compute_dtype: str) -> str:
    """The name in KV_CACHE_FORMATS that `--kv-cache-dtype` means."""
    return {"auto": compute_dtype, "fp8": "fp8_e4m3"}.get(asked, asked)
