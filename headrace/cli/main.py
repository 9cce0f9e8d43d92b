"""The command `headrace`: finds the subcommand and calls it.

Only what a subcommand needs is imported, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from headrace import __version__

if TYPE_CHECKING:
    from headrace.server.core_start import StartCore

USAGE = """\
Headrace serves open language models on your own machine.

  headrace up               serve the bundled model with the gateway before it, and show how to use them
  headrace serve [MODEL]    serve a model directory, a .gguf file or a hub id, with vLLM's flags
  headrace run-batch IN OUT answer a file of requests, a line each, without a server; goes on after a kill
  headrace gateway          one address and one key for many models; `headrace gateway check` tests its configuration
  headrace key              make, list, revoke and rotate the gateway's keys, and see what they used
  headrace connect TOOL     settings for codex, claude-code, cline, continue, openai or curl
  headrace version          print the version

`headrace serve --help` lists the flags by what you want to do.
"""

EXTRAS = {
    "numpy": "engine",
    "tokenizers": "engine",
    "jinja2": "engine",
    "aiohttp": "gateway",
    "alembic": "gateway",
    "sqlalchemy": "gateway",
    "psycopg": "postgres",
}
"""Which extra of the installation brings a package that a command may lack."""


NOT_WRITTEN = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of writing where the output goes: nobody reads it, the disk is full."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (2 for a command that is wrong)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _open_standard_streams()
    with _interrupts_end_it():
        try:
            status = _run(words)
            sys.stdout.flush()
            return status
        except OSError as error:
            if error.errno not in NOT_WRITTEN or error.filename is not None:
                raise
            _drop_what_cannot_be_written()
            if error.errno != errno.EPIPE:  # a reader that has seen enough (`| head`) is no mistake
                command = " ".join(["headrace", *words[:1]])
                print(f"{command}: the output cannot be written: {error.strerror}.", file=sys.stderr, flush=True)
            return 1
        except KeyboardInterrupt:
            return 130


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if words else 2
    name, *rest = words
    command = COMMANDS.get(name.lower())
    if command is None:
        from headrace.config.flags import closest

        near = closest(name, COMMANDS)
        hint = f"Did you mean headrace {near}?" if near else "`headrace --help` lists the commands."
        print(f"headrace: unknown command {name}. {hint}", file=sys.stderr)
        return 2
    try:
        return command(rest)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(f"headrace {name} needs the package {error.name}: pip install 'headrace[{extra}]'", file=sys.stderr)
        return 1


def _open_standard_streams() -> None:
    """Where the caller closed one (`>&-`), the null device: else the next file or socket opened would get its number,
    and what is printed would go there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _drop_what_cannot_be_written() -> None:
    """What is still buffered would be tried again at the end of the process, and fail with a trace."""
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)


@contextlib.contextmanager
def _interrupts_end_it() -> Iterator[None]:
    """Until a command handles signals itself Ctrl-C ends the process on the spot, as it does most programs.

    Python's own way is an exception wherever the process is: in the middle of an import it is a trace, or lost.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, as in the background of a script
        yield
        return
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    except ValueError:  # called in a thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _core_at_once(words: Sequence[str]) -> Iterator[StartCore]:
    """How to start cores; where the words ask for an engine the first is under way already, before anything else."""
    from headrace.server.core_start import EarlyCore, start_core

    names = {word.partition("=")[0].replace("_", "-") for word in words}
    lacks = any(find_spec(package) is None for package, extra in EXTRAS.items() if extra == "engine")
    if lacks or names & {"-h", "--help", "--dry-run"}:
        yield start_core
        return
    with EarlyCore() as early:
        yield early.start


def _serve(words: Sequence[str]) -> int:
    with _core_at_once(words) as start_core:
        from headrace.cli.serve import serve_command

        return serve_command("serve", words, start_core)


def _up(words: Sequence[str]) -> int:
    with _core_at_once(words) as start_core:
        from headrace.cli.up import up_command

        return up_command(words, start_core)


def _run_batch(words: Sequence[str]) -> int:
    from headrace.cli.run_batch import run_batch_command

    return run_batch_command(words)


def _gateway(words: Sequence[str]) -> int:
    from headrace.cli.gateway import gateway_command

    return gateway_command(words)


def _key(words: Sequence[str]) -> int:
    from headrace.cli.key import key_command

    return key_command(words)


def _connect(words: Sequence[str]) -> int:
    from headrace.cli.connect import connect_command

    return connect_command(words)


def _version(words: Sequence[str]) -> int:
    print(f"headrace {__version__}")
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "up": _up,
    "serve": _serve,
    "run-batch": _run_batch,
    "gateway": _gateway,
    "key": _key,
    "connect": _connect,
    "version": _version,
    "--version": _version,
}

if __name__ == "__main__":
    sys.exit(main())
