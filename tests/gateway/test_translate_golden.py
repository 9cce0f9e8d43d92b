"""Typical conversations, kept as files: what the client asks, what the upstream is sent, what it streams, and what the
client receives. `python -m tests.gateway.test_translate_golden` writes the translated halves anew; read the difference.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.protocol.translate.translator import StreamTranslator, translate_request
from headrace.protocol.translate.wire import Json

FILES = sorted((Path(__file__).parent / "golden").glob("*.json"))
WRITTEN = ("sent", "dropped", "received")


def translated(case: Json) -> Json:
    """The halves of a conversation that are ours."""
    request = translate_request(
        case["request"],
        client=case["client"],
        upstream=case["upstream"],
        model=case["request"]["model"],
        upstream_model=case.get("upstream_model", "real-model"),
        request_id="req-1",
        created_s=1_764_400_000,
        prompt_tokens=100,
    )
    stream = StreamTranslator(request.exchange)
    upstream = "".join(f"data: {json.dumps(event)}\n\n" for event in case["stream"])
    outgoing = [*stream.feed(upstream.encode()), *stream.finish()]
    received = ["[DONE]" if event.data is None else dict(event.data) for event in outgoing]
    return {"sent": request.body, "dropped": list(request.dropped), "received": received}


def laid_out(case: Json) -> str:
    """Readable: requests indented, one event a line."""
    rows = []
    for name, value in case.items():
        if name in ("stream", "received"):
            inner = ",\n".join("    " + json.dumps(event, ensure_ascii=False) for event in value)
            rows.append(f'  "{name}": [\n{inner}\n  ]')
        else:
            text = json.dumps(value, ensure_ascii=False, indent=2).replace("\n", "\n  ")
            rows.append(f'  "{name}": {text}')
    return "{\n" + ",\n".join(rows) + "\n}\n"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_conversation_is_translated_as_written_down(file: Path):
    case = json.loads(file.read_text())
    found = translated(case)
    assert found["sent"] == case["sent"]
    assert found["dropped"] == case["dropped"]
    assert found["received"] == case["received"]
    assert laid_out(case) == file.read_text()


def rewrite() -> None:
    for file in FILES:
        case = json.loads(file.read_text())
        kept = {name: value for name, value in case.items() if name not in WRITTEN}
        ours = translated(case)
        ordered = {name: value for name, value in kept.items() if name != "stream"}
        ordered |= {"sent": ours["sent"], "dropped": ours["dropped"], "stream": kept["stream"]}
        file.write_text(laid_out(ordered | {"received": ours["received"]}))


if __name__ == "__main__":
    rewrite()
