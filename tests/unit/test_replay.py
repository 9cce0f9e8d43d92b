"""What a request's reader sees of the core's death, and who is suspected of it, without a core."""

from __future__ import annotations

import asyncio

import pytest

from headrace.protocol import ipc
from headrace.protocol.errors import ApiError
from headrace.server.metrics import RequestRecord
from headrace.server.replay import Replays
from headrace.server.request_stream import RequestStream


def stream(name: str = "r", *, streamed: bool = False, n: int = 1, background: bool = False) -> RequestStream:
    params = ipc.SamplingParams(max_tokens=9, n=n)
    priority = ipc.BACKGROUND_PRIORITY if background else 0
    message = ipc.AddRequest(request_id=name, token_ids=[1, 2], params=params, arrival_s=0.0, priority=priority)
    opened = RequestStream(message, RequestRecord(2, params, 0.0), streamed=streamed)
    opened.in_core = True
    return opened


def output(*token_ids: int, index: int = 0, end: ipc.FinishReason | None = None, **more) -> ipc.SequenceOutput:
    return ipc.SequenceOutput(request_id="r", index=index, token_ids=list(token_ids), finish_reason=end, **more)


def read(opened: RequestStream) -> ipc.SequenceOutput | None:
    return asyncio.run(opened.next())


def test_the_reader_gets_every_token_once_however_often_they_come():
    opened = stream()
    opened.push(output(5))
    opened.push(output(6))
    assert read(opened).token_ids == [5, 6]
    opened.push(output(7))  # never read
    opened.rewind()
    assert opened.push(output(5)) is None
    assert opened.push(output(6, 7)).token_ids == [7]
    opened.push(output(8, end="length"))
    assert read(opened).token_ids == [7, 8]
    assert read(opened) is None


def test_scores_of_the_prompt_come_once_too():
    scores = [ipc.TokenLogprobs(t, -1.0, 1, [], []) for t in range(4)]
    opened = stream()
    opened.push(output(prompt_logprobs=scores[:3]))
    assert read(opened).prompt_logprobs == scores[:3]
    opened.rewind()
    assert opened.push(output(prompt_logprobs=scores[:2])) is None
    assert opened.push(output(prompt_logprobs=scores[2:])).prompt_logprobs == scores[3:]


def test_tokens_that_come_out_otherwise_end_the_request_rather_than_be_glued_together():
    opened = stream()
    opened.push(output(5))
    read(opened)
    opened.rewind()
    assert opened.push(output(9)) is None
    with pytest.raises(ApiError, match="died before this request was done"):
        read(opened)


def test_a_sequence_that_had_ended_stays_as_it_was():
    opened = stream(n=2)
    opened.push(output(5, index=0, end="stop"))
    opened.push(output(6, index=1))
    opened.rewind()
    assert opened.open == {1}
    opened.push(output(6, index=1, end="stop"))
    assert {read(opened).index, read(opened).index} == {0, 1}
    assert read(opened) is None


def test_only_what_left_this_process_cannot_be_done_again():
    streamed, whole = stream(streamed=True), stream(streamed=False)
    for opened in (streamed, whole):
        opened.push(output(5))
        assert opened.repeatable
        read(opened)
    assert (streamed.repeatable, whole.repeatable) == (False, True)


def sent(replays: Replays) -> list[str]:
    due = replays.due()
    for opened in due:
        opened.in_core = True
    return [opened.message.request_id for opened in due]


def test_requests_are_tried_one_by_one_and_newcomers_wait_until_the_last_is_past():
    first, second, new = stream("first"), stream("second"), stream("new")
    new.in_core = False
    first.push(output(5, 6))
    replays = Replays()
    assert replays.after_death([first, second]) == []
    replays.hold(new)
    assert sent(replays) == ["first"]
    first.push(output(5, 6))
    assert sent(replays) == []  # as far as where it was, and no further
    first.push(output(7))
    assert sent(replays) == ["second"]
    second.push(output(8))
    assert sent(replays) == ["new"]
    assert not replays


def test_the_one_being_tried_is_to_blame_and_nobody_else():
    first, second, _ = streams = [stream(name) for name in ("first", "second", "third")]
    replays = Replays()
    replays.after_death(streams)
    sent(replays)
    first.push(output(5))
    sent(replays)
    assert replays.after_death(streams) == [second]
    second.fail(ApiError(500, "it"))
    assert sent(replays) == ["first"]
    first.push(output(5))
    assert sent(replays) == []  # it had one token at the death
    first.push(output(6))
    assert sent(replays) == ["third"]


def test_a_reader_who_leaves_holds_up_nobody():
    first, second = stream("first"), stream("second")
    replays = Replays()
    replays.after_death([first, second])
    first.open.clear()
    assert sent(replays) == ["second"]


def held(replays: Replays, name: str, *, background: bool = False) -> RequestStream:
    """A request that comes while others are being done again."""
    opened = stream(name, background=background)
    opened.in_core = False
    replays.hold(opened)
    return opened


def test_no_request_of_a_person_waits_for_a_line_of_a_batch():
    lines = [stream(f"line {i}", background=True) for i in range(3)]
    person = stream("person")
    replays = Replays()
    assert replays.after_death([*lines, person]) == []
    assert sent(replays) == ["person"], "it is tried first, though it came last"
    held(replays, "second person")
    held(replays, "line 3", background=True)
    assert sent(replays) == [], "the one being tried may kill this core too"
    person.push(output(5))
    assert sent(replays) == ["second person", "line 0"]
    held(replays, "third person")
    assert sent(replays) == ["third person"]
    for number in range(3):
        lines[number].push(output(5))
        assert sent(replays) == [f"line {number + 1}"]
    assert not replays
    assert [line.num_deaths for line in lines] == [1, 1, 1]


def test_a_line_that_kills_is_found_with_people_beside_it_and_costs_none_of_them_an_error():
    killer, line = (stream(name, background=True) for name in ("killer", "line"))
    person = stream("person")
    replays = Replays()
    open_streams = [killer, line, person]
    replays.after_death(open_streams)
    sent(replays)
    person.push(output(5))
    assert sent(replays) == ["killer"]
    new = held(replays, "new")
    assert sent(replays) == ["new"]
    assert replays.after_death([*open_streams, new]) == [killer]
    killer.fail(ApiError(500, "it"))
    assert sent(replays) == ["person"]
    person.push(output(5, 6))
    assert sent(replays) == ["new"]
    new.push(output(5))
    assert sent(replays) == ["line"]
    assert (person.num_deaths, new.num_deaths, line.num_deaths) == (1, 1, 1)


def test_a_newcomer_that_kills_beside_a_line_is_tried_before_another_line():
    lines = [stream(f"line {i}", background=True) for i in range(3)]
    replays = Replays()
    replays.after_death(lines)
    assert sent(replays) == ["line 0"]
    killer = held(replays, "killer")
    assert sent(replays) == ["killer"]
    assert replays.after_death([*lines, killer]) == [lines[0]]
    lines[0].fail(ApiError(500, "it"))
    assert sent(replays) == ["killer"], "alone"
    assert replays.after_death([*lines[1:], killer]) == [killer]
    killer.fail(ApiError(500, "it"))
    assert sent(replays) == ["line 1"]
