"""How many tokens a request probably has, from the bytes of its body: no tokenizer, no decoding.

UTF-8 bytes / 3.6, the average of English prose and code, with three corrections: a CJK character is three bytes
(or a six-byte \\uXXXX escape) but about three quarters of a token; an image or file in base64 counts as a whole; a
prompt of token ids is counted exactly. Rules, budgets and the overflow fallback use it; bills use the upstream's count.
"""

from __future__ import annotations

import re

BYTES_PER_TOKEN = 3.6
TOKENS_PER_CJK_CHARACTER = 0.75
TOKENS_PER_ATTACHMENT = 1000

# First bytes of U+3000 to U+D7FF in UTF-8: CJK punctuation, kana, hanzi, hangul.
_CJK_FIRST_BYTES = bytes(range(0xE3, 0xEE))
_BASE64_RUN = re.compile(rb"[A-Za-z0-9+/=_\\-]{1024,}")
_TOKEN_IDS = re.compile(rb"\s*+\[[\[\]\d,\s]++")
_DIGIT = re.compile(rb"\d")


def estimate_tokens(text: bytes) -> int:
    """Tokens in the raw JSON of `messages`, `prompt` or `input`.

    b'"hello"' is 2; b'[15339, 1917]' is 2; '"你好世界"' is 4.
    """
    if b'"' not in text and _TOKEN_IDS.fullmatch(text) and _DIGIT.search(text):
        return text.count(b",") + 1
    attachments = 0
    if len(text) > 1024 and b"base64" in text:
        text, attachments = _BASE64_RUN.subn(b"", text)
    cjk = 0 if text.isascii() else len(text) - len(text.translate(None, _CJK_FIRST_BYTES))
    escaped = text.count(b"\\u")
    plain = len(text) - 3 * cjk - 6 * escaped
    return round(
        max(plain, 0) / BYTES_PER_TOKEN
        + (cjk + escaped) * TOKENS_PER_CJK_CHARACTER
        + attachments * TOKENS_PER_ATTACHMENT
    )
