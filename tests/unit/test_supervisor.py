"""The rules by which a core is judged and restarted, with made-up clocks."""

from __future__ import annotations

from headrace.protocol import ipc
from headrace.server.request_stream import merge
from headrace.server.supervisor import Backoff, Heartbeat, describe_exit


def test_restarts_are_spaced_out_up_to_half_a_minute():
    backoff = Backoff()
    assert [backoff.after_death(0.0) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_minute_of_health_is_forgiven():
    backoff = Backoff()
    for _ in range(5):
        backoff.after_death(1.0)
    assert backoff.after_death(60.0) == 0.5
    assert backoff.after_death(59.0) == 1


def ticks(heartbeat: Heartbeat, seconds: float, pending: bool = True, start: float = 0.0) -> float:
    now = start
    while now < start + seconds:
        now += 0.25
        heartbeat.tick(now, pending)
    return now


def test_silence_counts_only_while_work_is_pending():
    heartbeat = Heartbeat(step_timeout_s=2.0, interval_s=0.25)
    now = ticks(heartbeat, 10.0, pending=False)
    assert not heartbeat.late
    now = ticks(heartbeat, 1.0, start=now)
    assert not heartbeat.late
    now = ticks(heartbeat, 1.5, start=now)
    assert heartbeat.late and not heartbeat.dead
    ticks(heartbeat, 2.0, start=now)
    assert heartbeat.dead
    heartbeat.beat()
    assert not heartbeat.late and not heartbeat.dead


def test_a_server_that_was_itself_stopped_does_not_blame_the_core():
    heartbeat = Heartbeat(step_timeout_s=2.0, interval_s=0.25)
    heartbeat.tick(0.0, True)
    heartbeat.tick(3600.0, True)
    assert heartbeat.silent_s == 0.5


def test_the_limit_follows_the_length_of_the_steps():
    heartbeat = Heartbeat(step_timeout_s=None, interval_s=0.25)
    assert heartbeat.timeout_s == 30.0
    heartbeat.beat(step_s=4.0)
    assert heartbeat.timeout_s == 80.0
    for _ in range(100):
        heartbeat.beat(step_s=0.1)
    assert heartbeat.timeout_s == 30.0


def test_a_kill_is_explained():
    assert "ran out of memory" in describe_exit(-9)
    assert describe_exit(-11) == "died of SIGSEGV"
    assert describe_exit(1) == "exited with status 1"


def test_merged_outputs_hold_everything_of_both():
    first = ipc.SequenceOutput(request_id="r", index=0, token_ids=[1, 2], num_cached_tokens=32, queue_s=0.5)
    second = ipc.SequenceOutput(request_id="r", index=0, token_ids=[3], finish_reason="stop", stop_token_id=3)
    both = merge(first, second)
    assert (both.token_ids, both.finish_reason, both.stop_token_id) == ([1, 2, 3], "stop", 3)
    assert (both.num_cached_tokens, both.queue_s) == (32, 0.5)
