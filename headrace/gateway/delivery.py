"""Bringing one upstream's answer to the client.

Until the first content is there, whatever goes wrong is an UpstreamFailure and nothing of it has reached the client.
After that the answer is committed: a failure is told inside the stream, and `deliver` returns it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from headrace.gateway import headers, upstream_errors
from headrace.gateway.body import Fields
from headrace.gateway.continuation import Record, Said, as_one, mark
from headrace.gateway.deadline import Deadline
from headrace.gateway.error_forms import comment
from headrace.gateway.estimate import estimate_tokens
from headrace.gateway.exchange import Exchange
from headrace.gateway.progress import Progress
from headrace.gateway.request import Call, Request
from headrace.gateway.snapshot import Upstream
from headrace.gateway.stream import (
    DONE,
    MAX_EVENT_BYTES,
    Framer,
    Renaming,
    Usage,
    Watch,
    answer_text,
    events,
    is_content,
    is_usage_only,
    read_usage,
)
from headrace.gateway.translation import encoded
from headrace.gateway.upstream_client import BrokenAnswer, UpstreamAnswer
from headrace.gateway.upstream_errors import UpstreamFailure
from headrace.gateway.whole_answer import Top, checked, value_of
from headrace.gateway.whole_stream import openai_stream, self_translator
from headrace.protocol.errors import ApiError
from headrace.protocol.translate.events import Dialect
from headrace.protocol.translate.exchange import Outgoing
from headrace.protocol.translate.translator import StreamTranslator

MAX_HELD_BYTES = 256 * 1024
USAGE_S = 0.7
"""How long an upstream that has finished may take for its usage when the client has left: it is cut within a second."""

RawHeaders = headers.RawHeaders


class Delivery:
    """One attempt's answer on its way."""

    def __init__(
        self,
        exchange: Exchange,
        request: Request,
        call: Call,
        upstream: Upstream,
        deadline: Deadline,
        progress: Progress,
        gateway_headers: RawHeaders,
        *,
        record: Record | None = None,
        before: Said | None = None,
    ) -> None:
        """`record`: what the client gets is kept. `before`: what it has already, of an answer that broke."""
        self.exchange = exchange
        self.request = request
        self.call = call
        self.upstream = upstream
        self.deadline = deadline
        self.progress = progress
        self.gateway_headers = gateway_headers
        self.committed = False
        """Content has reached the client."""
        self._framer = Framer()
        self._renaming: Renaming | None = None
        self._record, self._before = record, before
        self._translator = call.translation.stream() if call.translation and request.stream else None
        if before is not None:
            self._translator = before.translator
        self._last_words = b""
        """What a translator said when it failed: the events before the failure, and the client's own error event."""

    @property
    def model_shown(self) -> str:
        return self.request.facts.model or self.progress.route.model.name

    @property
    def renames(self) -> bool:
        attempt = self.progress.attempt
        return attempt is not None and attempt.model != self.model_shown

    async def deliver(self, answer: UpstreamAnswer) -> None:
        """Raises UpstreamFailure; whether anything had reached the client by then, `committed` says."""
        if self.request.endpoint.kind == "opaque":
            return await self._opaque(answer)
        if not self.request.stream:
            return await self._whole(answer)
        kind = answer.content_type
        if kind != "text/event-stream":
            if kind == "application/json" and self._before is None:
                return await self._whole_as_stream(answer)
            body = await answer.read_error()
            fields = upstream_errors.error_fields(body)
            if fields:
                raise upstream_errors.from_error_body(self.upstream, fields)
            described = upstream_errors.described(body, answer.headers)
            raise upstream_errors.invalid_response(self.upstream, f"a stream was asked for and {described} came")
        watch = Watch(self.call.wire)
        framer = self._framer
        held, unseen = await self._hold_back(answer, watch, framer)
        self.progress.watch = watch
        self.committed = True
        self.deadline.began()
        if self._before is None:
            self.progress.ttft_s = time.perf_counter() - self.exchange.began_s
            held = await self._open() + held
        await self.exchange.end(await self._pass_on(answer, watch, framer, held, unseen))

    async def _open(self) -> bytes:
        """Begin the stream. Returns what stands before the answer: whose it is, where the head named another."""
        await self.exchange.stream(200, [*headers.EVENT_STREAM, *self.gateway_headers])
        announced, attempt = self.progress.announced, self.progress.attempt
        if announced is None or attempt is None or announced is attempt:
            return b""
        return comment(f"answered by {attempt.upstream.name} with {attempt.model}")

    def said(self) -> Said | None:
        """What the client has of the answer, where somebody else can go on with it."""
        watch = self.progress.watch
        if self._record is None or watch is None or watch.finished or self.exchange.mid_event:
            return None
        if self._translator is not None and self._translator.is_done:
            return None
        return self._record.said(self.model_shown if self.renames else None, watch.num_deltas, self._translator)

    async def await_usage(self, answer: UpstreamAnswer) -> None:
        """The client has left. Where the answer was over but for its usage, that is waited for: nothing more is
        generated meanwhile, and the bill is exact."""
        watch = self.progress.watch
        if watch is None or not watch.finished or watch.usage is not None:
            return
        with contextlib.suppress(BrokenAnswer, TimeoutError):
            async with asyncio.timeout(USAGE_S):
                while watch.usage is None and not watch.ended and (data := await answer.read()):
                    for event in events(self._framer.feed(data)):
                        watch.look(event)

    async def break_off(self, error: ApiError) -> None:
        """Tell the client, inside the stream that has begun, that this is not the whole answer."""
        if self._translator is not None:
            return await self.exchange.end_stream(self._last_words + encoded(self._translator.fail(error)))
        watch = self.progress.watch
        await self.exchange.break_off(
            error,
            response_id=watch.response_id if watch else None,
            sequence_number=watch.num_events if watch else 0,
        )

    # Streams

    async def _hold_back(self, answer: UpstreamAnswer, watch: Watch, framer: Framer) -> tuple[bytes, bytes]:
        """Everything up to the first content as the client gets it, and events behind it that came along with it."""
        held: list[bytes] = []
        size = 0
        begins = False
        unseen: list[bytes] = []
        while not begins:
            try:
                data = await answer.read()
            except BrokenAnswer:
                raise upstream_errors.truncated(self.upstream, " before its first word") from None
            block = framer.feed(data) if data else framer.rest + b"\n\n"
            for event in events(block):
                if begins:
                    unseen.append(event)
                    continue
                value = watch.look(event)
                self._refuse_broken(watch)
                begins = value is not None and is_content(self.call.wire, value)
                if self._record is not None:
                    self._record.add(event)
                if begins or self._before is None:
                    held.append(self._for_client(event, value))
            size += len(data)
            if begins or watch.finished or size > MAX_HELD_BYTES:
                break
            if watch.ended:
                raise upstream_errors.invalid_response(self.upstream, "its stream ended without an answer in it")
            if not data:
                raise upstream_errors.truncated(self.upstream, " before its first word")
        if self._before is not None:
            held.insert(0, mark(self.upstream.name, self.progress.causes[-1]))
        elif self.renames and watch.model is not None and self._translator is None:
            self._renaming = Renaming(watch.model, self.model_shown)
        return self._renamed(b"".join(held)), b"".join(unseen)

    async def _pass_on(self, answer: UpstreamAnswer, watch: Watch, framer: Framer, held: bytes, unseen: bytes) -> bytes:
        """The rest of the stream. Returns its last bytes, not yet written. Raises UpstreamFailure."""
        exchange, deadline, renaming = self.exchange, self.deadline, self._renaming
        record = self._record
        looks = self._translator is not None or self._before is not None
        block = held

        def take(data: bytes) -> bool:
            """Whole events that need no look go on as they come, as most do."""
            if framer.rest or not data.endswith(b"\n\n") or exchange.mid_event or watch.is_marked(data):
                return False
            if not exchange.write_now(data if renaming is None else renaming.apply(data)):
                return False
            watch.passed(data)
            if record is not None:
                record.add(data)
            deadline.touch()
            return True

        if unseen:
            if looks or watch.is_marked(unseen):
                await exchange.write(held)
                block = await self._looked_at(unseen, watch)
            else:
                watch.passed(unseen)
                if record is not None:
                    record.add(unseen)
                block = held + self._renamed(unseen)
        while not watch.ended:
            if block:
                await exchange.write(block)
            try:
                data = await answer.read(None if looks else take)
            except BrokenAnswer:
                raise upstream_errors.truncated(self.upstream) from None
            if not data:
                block = self._end_of_body(watch, framer)
                break
            deadline.touch()
            block = framer.feed(data)
            if block:
                if looks or watch.is_marked(block):
                    block = await self._looked_at(block, watch)
                else:
                    watch.passed(block)
                    if record is not None:
                        record.add(block)
                    block = self._renamed(block)
                exchange.mid_event = False
            elif len(framer.rest) > MAX_EVENT_BYTES and not looks:
                block, framer.rest = framer.rest, b""
                exchange.mid_event = True
                self._record = record = None
        if not watch.complete:
            if block:
                await exchange.write(block)
            raise upstream_errors.truncated(self.upstream)
        if self._translator is not None:
            return block + self._translated(self._translator, self._translator.finish())
        if self.call.wire == "openai" and not watch.ended:
            return block + DONE
        return block

    async def _looked_at(self, block: bytes, watch: Watch) -> bytes:
        """The events of a block as the client gets them. Raises UpstreamFailure at an error, after what came before."""
        kept: list[bytes] = []
        for event in events(block):
            value = watch.look(event)
            try:
                self._refuse_broken(watch)
                if self._record is not None:
                    self._record.add(event)
                kept.append(self._for_client(event, value))
            except UpstreamFailure:
                if kept:
                    await self.exchange.write(self._renamed(b"".join(kept)))
                raise
        return self._renamed(b"".join(kept))

    def _end_of_body(self, watch: Watch, framer: Framer) -> bytes:
        """The connection's stream is over: what is left may be a last event without its blank line."""
        if not framer.rest.strip():
            return b""
        event = framer.rest + b"\n\n"
        value = watch.look(event)
        if watch.invalid is not None:
            raise upstream_errors.truncated(self.upstream)
        self._refuse_broken(watch)
        return self._renamed(self._for_client(event, value))

    def _for_client(self, event: bytes, value: dict[str, Any] | None) -> bytes:
        if self._before is not None and value is not None:
            event = as_one(value, self._before)
        if self._translator is not None:
            return self._translated(self._translator, self._translator.feed(event))
        if value is not None and not self.request.wants_usage and is_usage_only(value):
            return b""
        return event

    def _translated(self, translator: StreamTranslator, sent: list[Outgoing]) -> bytes:
        """What the translator has just said. Raises UpstreamFailure when that was that it failed."""
        said = encoded(sent)
        if translator.error is not None:
            self._last_words = said
            raise UpstreamFailure(translator.error)
        return said

    def _refuse_broken(self, watch: Watch) -> None:
        if watch.error is not None:
            raise upstream_errors.from_error_body(self.upstream, watch.error)
        if watch.invalid is not None:
            raise upstream_errors.invalid_response(self.upstream, watch.invalid)

    def _renamed(self, block: bytes) -> bytes:
        return block if self._renaming is None else self._renaming.apply(block)

    # Whole answers

    async def _whole_as_stream(self, answer: UpstreamAnswer) -> None:
        """A stream was asked for and a whole answer came: its events are those that the stream would have had."""
        body, top = await self._read_checked(answer)
        progress, wire = self.progress, self.call.wire
        if self._translator is None and wire == "openai":
            value = value_of(self.upstream, body)
            progress.usage = read_usage(value.get("usage"))
            self._estimate_missing(value)
            name = self.model_shown if self.renames or not top.model else value_of(self.upstream, top.model)
            said = openai_stream(value, name, wants_usage=self.request.wants_usage)
        else:
            if self._translator is None:
                dialect: Dialect = "messages" if wire == "messages" else "responses"
                self._translator = self_translator(self.request, dialect, self.model_shown)
            said = self._translated(self._translator, self._translator.feed_answer(body))
            used = self._translator.usage
            progress.usage = Usage(used.input_tokens, used.output_tokens, used.cached_tokens)
            progress.is_estimate = used.estimated
        progress.ttft_s = time.perf_counter() - self.exchange.began_s
        self.committed = True
        await self.exchange.end(await self._open() + said)

    async def _whole(self, answer: UpstreamAnswer) -> None:
        body, top = await self._read_checked(answer)
        progress = self.progress
        progress.usage = read_usage(value_of(self.upstream, top.usage)) if top.usage else None
        if self.call.translation is not None:
            try:
                body, progress.usage, progress.is_estimate = self.call.translation.answer(body)
            except ApiError as error:
                raise UpstreamFailure(error) from None
        elif top.model and self.renames:
            body = Fields(body).changed({"model": self.model_shown})
        if progress.usage is None and self.request.endpoint.kind == "generate":
            self._estimate_missing(value_of(self.upstream, body))
        self.committed = True
        passed = headers.to_client(answer.raw_headers)
        await self.exchange.answer(answer.status, body, [*passed, *self.gateway_headers])

    def _estimate_missing(self, answer: object) -> None:
        """Where the upstream told no usage."""
        if self.progress.usage is None:
            inputs = self.request.facts.prompt_tokens
            self.progress.usage = Usage(inputs, estimate_tokens(answer_text(answer)))
            self.progress.is_estimate = True

    async def _read_checked(self, answer: UpstreamAnswer) -> tuple[bytes, Top]:
        try:
            body = await answer.read_whole()
        except BrokenAnswer:
            raise upstream_errors.truncated(self.upstream) from None
        return body, checked(body, answer, self.upstream, self.request.endpoint.name, self.call.wire)

    # Answers that nobody looks into

    async def _opaque(self, answer: UpstreamAnswer) -> None:
        try:
            data = await answer.read()
        except BrokenAnswer:
            raise upstream_errors.truncated(self.upstream) from None
        if answer.content_type == "text/html":
            described = upstream_errors.described(data, answer.headers)
            raise upstream_errors.invalid_response(self.upstream, f"{described} came with status 200")
        if answer.content_type == "application/json" and upstream_errors.error_fields(data) and b'"error"' in data:
            raise upstream_errors.from_error_body(self.upstream, upstream_errors.error_fields(data))
        self.committed = True
        self.progress.ttft_s = time.perf_counter() - self.exchange.began_s
        passed = headers.to_client(answer.raw_headers)
        await self.exchange.stream(answer.status, [*passed, *self.gateway_headers], events=False)
        self.deadline.began()
        try:
            while data:
                await self.exchange.write(data)
                data = await answer.read()
                self.deadline.touch()
        except BrokenAnswer:
            raise upstream_errors.truncated(self.upstream) from None
        await self.exchange.end()
