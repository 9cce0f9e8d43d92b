"""The way into the queue: a request with a grammar waits before it until that is compiled.

The scheduler hears of a request when it can be run, so nobody waits behind one that cannot. What the compiler finds
wrong is a refusal like the scheduler's own, only later.
"""

from __future__ import annotations

from headrace.engine.admission import Refusal
from headrace.engine.scheduler import Scheduler
from headrace.protocol.ipc import AddRequest, GrammarSpec
from headrace.runtime.grammar import GrammarError
from headrace.runtime.grammar_store import GrammarStore


class GrammarGate:
    """Before a scheduler; a request holds its grammar in the store from its arrival to its end."""

    def __init__(self, store: GrammarStore, scheduler: Scheduler) -> None:
        self._store = store
        self._scheduler = scheduler
        self._waiting: dict[str, tuple[AddRequest, GrammarSpec]] = {}
        self._refused: list[tuple[str, Refusal]] = []

    @property
    def is_waiting(self) -> bool:
        """A request waits for its grammar."""
        return bool(self._waiting)

    @property
    def wake(self) -> int:
        """A file descriptor that can be read when a grammar has become ready: then `open` has something to do."""
        return self._store.wake

    def wait(self) -> None:
        """Until `open` has something to do."""
        self._store.wait()

    def add(self, request: AddRequest) -> Refusal | None:
        """Queue the request, now or when its grammar is ready."""
        spec, request_id = request.params.grammar, request.request_id
        if spec is None:
            return self._scheduler.add(request)
        if request_id in self._waiting or self._scheduler.knows(request_id):
            return Refusal("invalid_request", f"The request id {request_id!r} is in use already.")
        settings = self._scheduler.settings
        asks = not (request.is_background or request.is_let_in)
        if asks and len(self._waiting) >= settings.max_running + settings.max_num_queued_reqs:
            message = f"The grammars of {len(self._waiting)} requests are being compiled. Try again later."
            return Refusal("queue_full", message)
        if self._store.hold(request_id, spec):
            return self._queue(request)
        self._waiting[request_id] = request, spec
        return None

    def open(self) -> None:
        """Queue, or refuse, the requests whose grammar is ready by now."""
        if not self._waiting:
            return
        self._store.clear_wake()
        for request_id, (request, spec) in list(self._waiting.items()):
            try:
                if not self._store.take(spec):
                    continue
                refused = self._queue(request)
            except GrammarError as error:
                self._store.release(request_id)
                refused = Refusal("invalid_grammar", str(error), error.field or None)
            del self._waiting[request_id]
            if refused is not None:
                self._refused.append((request_id, refused))

    def take_refused(self) -> list[tuple[str, Refusal]]:
        """The requests that `open` refused since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def forget(self, request_id: str) -> None:
        """The request is to end before it is queued; if it is not here, that is no error."""
        self._waiting.pop(request_id, None)
        self.ended(request_id)

    def ended(self, request_id: str) -> None:
        """A sequence has ended; with the last of its request the grammar is let go."""
        if request_id not in self._waiting and not self._scheduler.knows(request_id):
            self._store.release(request_id)

    def _queue(self, request: AddRequest) -> Refusal | None:
        refused = self._scheduler.add(request)
        if refused is not None:
            self._store.release(request.request_id)
        return refused
