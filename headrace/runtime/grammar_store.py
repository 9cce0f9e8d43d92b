"""The grammars in use and the last ones used, compiled in threads of their own beside the steps.

A grammar is known by its text: requests that ask for the same share one. It stays as long as a request holds it, and
the last `KEPT` beyond that. The threads have less priority than the steps', so that compiling takes what they leave; a
short text, which is done in milliseconds, does not wait for a long one.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from headrace.config.model_files import ModelFiles
from headrace.protocol.ipc import GrammarSpec
from headrace.runtime.grammar import Grammar, GrammarError

KEPT = 64
SHORT_CHARS = 4096
STACK_BYTES = 16 << 20
"""Of the compiling threads; what needs more than half of it has been refused (grammar_check.py)."""
NICENESS = 10
"""Of the compiling threads, from 0 to 19: on a busy processor it gets a tenth of what a step's thread gets."""

Compile = Callable[[GrammarSpec], Grammar]
Key = tuple[str, str, tuple[int, ...]]


class GrammarStore:
    """Requests hold grammars by name. All methods are for the thread of the steps; only compiling happens elsewhere.

    `wake` is a file descriptor that can be read when a grammar has become ready.
    """

    def __init__(self, load: Callable[[], Compile]) -> None:
        """`load` makes a compiler, which takes a moment; it is called once, in a thread, with the first grammar."""
        self._load = load
        self._compile: Compile | None = None
        self._loading = threading.Lock()
        self._threads: dict[bool, ThreadPoolExecutor] = {}
        """One for short texts (True), one for long ones."""
        self._compiling: dict[Key, Future[Grammar]] = {}
        self._ready: OrderedDict[Key, Grammar] = OrderedDict()
        """Least recently used first."""
        self._holders: dict[str, Key] = {}
        self._held: dict[Key, int] = {}
        self.wake, self._waker = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self._waker, False)

    def close(self) -> None:
        """Forget everything. What is being compiled is finished, and nobody hears of it."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        os.close(self.wake)
        self.wake = -1

    def find(self, spec: GrammarSpec) -> Grammar | None:
        """The compiled grammar, if there is one."""
        return self._ready.get(_key(spec))

    def hold(self, holder: str, spec: GrammarSpec) -> bool:
        """From now on the grammar is kept, until `release`. True: it is ready. Else see `take`."""
        key = _key(spec)
        self._holders[holder] = key
        self._held[key] = self._held.get(key, 0) + 1
        if key in self._ready:
            self._ready.move_to_end(key)
            return True
        if key not in self._compiling:
            is_short = len(spec.text) <= SHORT_CHARS
            if is_short not in self._threads:
                self._threads[is_short] = ThreadPoolExecutor(1, "grammar", initializer=_step_back)
            usual = threading.stack_size(STACK_BYTES)
            try:
                future = self._compiling[key] = self._threads[is_short].submit(self._compiled, spec)
            finally:
                threading.stack_size(usual)
            future.add_done_callback(self._tell)
        return False

    def take(self, spec: GrammarSpec) -> bool:
        """Whether the grammar is ready by now. Raises GrammarError when it cannot be compiled."""
        key = _key(spec)
        if key in self._ready:
            return True
        future = self._compiling.get(key)
        if future is None or not future.done():
            return False
        try:
            grammar = future.result()
        except GrammarError:
            raise
        except Exception as error:
            raise GrammarError(f"`{spec.field}` cannot be compiled: {error}", spec.field) from error
        del self._compiling[key]
        self._ready[key] = grammar
        self._forget_some()
        return True

    def release(self, holder: str) -> None:
        """The holder needs its grammar no more; one that holds none is no error."""
        key = self._holders.pop(holder, None)
        if key is None:
            return
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]
            if (future := self._compiling.get(key)) is not None:
                future.cancel()
            self._forget_some()

    def wait(self) -> None:
        """Until a grammar is ready, or one was since the last call."""
        select.select([self.wake], [], [])

    def clear_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 4096)

    def _compiled(self, spec: GrammarSpec) -> Grammar:
        with self._loading:
            if self._compile is None:
                self._compile = self._load()
        return self._compile(spec)

    def _tell(self, future: Future[Grammar]) -> None:
        if not future.cancelled():
            with contextlib.suppress(OSError):  # full (then the reader wakes all the same), or closed
                os.write(self._waker, b"!")

    def _forget_some(self) -> None:
        done = [key for key, future in self._compiling.items() if future.done() and key not in self._held]
        for key in done:
            del self._compiling[key]
        spare = [key for key in self._ready if key not in self._held]
        for key in spare[: max(0, len(spare) - KEPT)]:
            del self._ready[key]


def compiler_of(files: ModelFiles, tokenizer_path: str | None) -> Compile:
    """Imported with the first grammar: the library and the tokenizer take 50 MB, which most engines never need."""
    from headrace.runtime.grammar_source import GrammarCompiler
    from headrace.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(files, None if tokenizer_path is None else Path(tokenizer_path))
    return GrammarCompiler(tokenizer, files.config.vocab_size).compile


def _key(spec: GrammarSpec) -> Key:
    return spec.kind, spec.text, spec.after_token_ids


def _step_back() -> None:
    """On Linux a thread has a niceness of its own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
