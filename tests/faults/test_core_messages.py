"""The core's loop meets messages it cannot use, requests it cannot take in, and a server that is gone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import core as core_module
from headrace.config.settings import EngineSettings
from headrace.core import CoreLoop, EngineCore
from headrace.protocol import ipc
from headrace.protocol.message_socket import MessageSocket
from tests.dying_core import KERNELS, ScriptedRunner
from tests.tiny_models import tiny_llama


class Loop:
    """A core's loop in a thread, with both ends of its conversation in hand."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        ours, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that it is full at once
        self.socket, self._inner = MessageSocket(ours), MessageSocket(theirs)
        self.thread = threading.Thread(target=CoreLoop(self._inner).run, args=(core,), daemon=True)
        self.thread.start()

    def send(self, message: ipc.ToCore) -> None:
        assert self.socket.send(ipc.encode(message))

    def add(self, name: str, token_ids: list[int], max_tokens: int = 4) -> None:
        params = ipc.SamplingParams(max_tokens=max_tokens)
        self.send(ipc.AddRequest(request_id=name, token_ids=token_ids, params=params, arrival_s=0.0))

    def until_end_of(self, name: str) -> list[ipc.FromCore]:
        messages = []
        while (payload := self.next()) is not None:
            message = ipc.from_core_decoder.decode(payload)
            messages.append(message)
            outputs = message.outputs if isinstance(message, ipc.StepOutput) else ()
            if any(output.request_id == name and output.finish_reason is not None for output in outputs):
                return messages
        raise AssertionError(f"{name} did not end; the loop is {'alive' if self.thread.is_alive() else 'dead'}")

    def next(self) -> bytes | None:
        if (payload := self.socket.receive()) is None:
            self.socket.wait(5)
            payload = self.socket.receive()
        return payload

    def wait_until_it_waits(self) -> None:
        """For this side to read: what it sends is not taken any more."""
        while not self._inner._unsent:
            time.sleep(0.001)

    def close(self) -> None:
        self.socket.close()
        self._inner.close()


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    monkeypatch.setattr(core_module, "Runner", ScriptedRunner)
    monkeypatch.setattr(core_module, "choose_kernels", lambda *arguments: KERNELS)
    running = Loop(EngineCore(EngineSettings(model=str(tiny_llama(tmp_path)), kv_cache_memory_bytes=2 << 20)))
    yield running
    if running.thread.is_alive():
        running.send(ipc.Stop())
        running.thread.join(5)
    running.close()


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"GET / HTTP/1.1\r\n", b"\x81\xa4type\xa7unknown", b"\xff" * 1000])
def test_a_message_that_is_none_is_left_out_and_the_work_goes_on(loop: Loop, garbage: bytes) -> None:
    loop.add("before", [1, 2, 3])
    loop.socket.send(garbage)
    loop.add("after", [1, 2, 4])
    loop.until_end_of("after")


def test_a_request_that_cannot_be_taken_in_fails_alone(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    real = loop.core.add

    def add(request: ipc.AddRequest):
        if request.request_id == "bad":
            raise MemoryError("no room for its tokens")
        return real(request)

    monkeypatch.setattr(loop.core, "add", add)
    loop.add("good", [1, 2, 3], max_tokens=30)
    loop.add("bad", [1, 2, 4])
    messages = loop.until_end_of("good")
    (refused,) = [message for message in messages if isinstance(message, ipc.Refused)]
    assert (refused.request_id, refused.code) == ("bad", "engine_error")
    assert "no room for its tokens" in refused.message


def test_what_is_unknown_or_over_can_be_aborted(loop: Loop) -> None:
    loop.send(ipc.AbortRequest(request_id="nobody"))
    loop.add("short", [1, 2, 3], max_tokens=1)
    loop.until_end_of("short")
    loop.send(ipc.AbortRequest(request_id="short", index=0))
    loop.send(ipc.AbortRequest(request_id="short", index=7))
    loop.add("next", [1, 2, 3])
    loop.until_end_of("next")


def test_a_control_that_fails_is_answered_and_the_work_goes_on(loop: Loop) -> None:
    loop.send(ipc.Control(number=3, action="stop_profile", path="/nowhere"))
    loop.send(ipc.Control(number=4, action="release_kv_cache"))  # these kernels have none
    loop.add("next", [1, 2, 3])
    answers = [m for m in loop.until_end_of("next") if isinstance(m, ipc.Controlled)]
    assert [(answer.number, answer.error is not None) for answer in answers] == [(3, True), (4, True)]


def test_a_message_is_taken_before_the_next_step_whenever_it_comes(loop: Loop) -> None:
    loop.add("long", [1, 2, 3], max_tokens=400)
    assert loop.next() is not None
    for number in range(150):
        time.sleep(0.0004 * (number % 17))  # at every moment of a step and between two
        loop.send(ipc.Control(number=number, action="reset_prefix_cache"))
        num_sent = 0
        while not isinstance(message := ipc.from_core_decoder.decode(loop.next()), ipc.Controlled):
            num_sent += 1
        assert message.number == number
        assert num_sent <= 4, "those of the steps before, and of the one it came in"


def test_a_core_whose_server_is_gone_ends_in_the_middle_of_its_work(loop: Loop) -> None:
    loop.add("endless", [1, 2, 3], max_tokens=400)
    assert loop.next() is not None
    loop.socket.close()
    loop.thread.join(10)
    assert not loop.thread.is_alive()


def test_a_server_that_reads_late_gets_everything(loop: Loop) -> None:
    for i in range(40):
        loop.add(f"request-{i}", [1, 2, i], max_tokens=100)
    loop.wait_until_it_waits()
    counts: dict[str, int] = {}
    while sum(counts.values()) < 40 * 100:
        message = ipc.from_core_decoder.decode(loop.next())
        for output in message.outputs:
            counts[output.request_id] = counts.get(output.request_id, 0) + len(output.token_ids)
    assert counts == {f"request-{i}": 100 for i in range(40)}


def test_a_core_that_waits_for_its_server_to_read_notices_that_it_is_gone(loop: Loop) -> None:
    for i in range(40):
        loop.add(f"request-{i}", [1, 2, i], max_tokens=400)
    loop.wait_until_it_waits()
    loop.socket.close()
    loop.thread.join(10)
    assert not loop.thread.is_alive()
