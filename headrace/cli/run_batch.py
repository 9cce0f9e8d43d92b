"""`headrace run-batch IN.jsonl OUT.jsonl`: a file of requests answered without a server.

Mistakes of the command and of the files end it with status 2 before a model is loaded. What OUT.jsonl holds already is
not done again, so the command may be killed and repeated.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.config.command_line import Given
    from headrace.config.load import Launch
    from headrace.server.run_batch import End, Files, Standing

USAGE = """\
headrace run-batch IN.jsonl OUT.jsonl [MODEL] [flags]     answer every line of a file, without a server
headrace run-batch -i IN.jsonl -o OUT.jsonl --model MODEL

IN.jsonl holds a request a line: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}.
OUT.jsonl gets a line for each, in any order, told apart by custom_id. What OUT.jsonl holds already is not done
again: repeat the command to go on after a kill. The status is 1 where some requests failed.

  -i, --input-file FILE     the requests, in place of IN.jsonl
  -o, --output-file FILE    the answers, in place of OUT.jsonl
  --json                    end with a summary in JSON on standard output

All other flags are the engine's: `headrace serve --help` lists them. Those about addresses and keys have no effect.
"""

_OWN = {"-i": "input", "--input-file": "input", "-o": "output", "--output-file": "output"}
_WITHOUT_EFFECT = {
    "--output-tmp-dir": "answers are written to their file at once",
    "--enable-metrics": "nothing listens, so there is nobody to ask for metrics",
    "--url": "nothing listens",
}
"""Of vLLM's run-batch."""
_STATUS = {"interrupted": 130, "terminated": 143}


@dataclass(frozen=True)
class _Words:
    """A command line taken apart; `rest` are the engine's flags."""

    source: Path
    output: Path
    as_json: bool
    rest: list[str]
    notices: list[str]


class _Mistake(Exception):
    pass


def run_batch_command(words: Sequence[str]) -> int:
    """Run `headrace run-batch` with `words`; returns the exit status."""
    if any(word in ("-h", "--help") for word in words):
        print(USAGE, end="")
        return 0

    from headrace.config.command_line import parse_command_line
    from headrace.config.load import LaunchError, load_given

    try:
        taken = _taken_apart(words)
        given = parse_command_line(taken.rest)
        launch = load_given(given)
    except _Mistake as mistake:
        return _refused([str(mistake)])
    except LaunchError as error:
        return _refused(error.errors)
    for notice in [*taken.notices, *_unused(given), *launch.notices]:
        print(f"Note: {notice}", file=sys.stderr, flush=True)
    return _run(launch, taken)


def _taken_apart(words: Sequence[str]) -> _Words:
    from headrace.config.command_line import parted

    own: dict[str, str] = {}
    notices: list[str] = []
    rest: list[str] = []
    todo = list(words)
    while todo:
        word = todo.pop(0)
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if word == "--json":
            own["json"] = word
        elif name in _OWN or name in _WITHOUT_EFFECT:
            if not equals and name != "--enable-metrics":
                if not todo:
                    raise _Mistake(f"{name} needs a value: {name} FILE.")
                value = todo.pop(0)
            if name in _OWN:
                own[_OWN[name]] = value
            else:
                notices.append(f"{name} has no effect: {_WITHOUT_EFFECT[name]}.")
        else:
            rest.append(word)
    plain, flags = parted(rest)
    for name in ("input", "output"):
        if name not in own:
            if not plain:
                raise _Mistake("say where the requests are and where answers go: headrace run-batch IN.jsonl OUT.jsonl")
            own[name] = plain.pop(0)
    source, output = Path(own["input"]), Path(own["output"])
    for name, text in (("requests", own["input"]), ("answers", own["output"])):
        if "://" in text:
            raise _Mistake(f"{text}: {name} are read and written as files on this machine.")
    if not source.is_file():
        raise _Mistake(f"{source}: there is no such file.")
    if not os.access(source, os.R_OK):
        raise _Mistake(f"{source}: this user may not read it.")
    if output.exists() and source.samefile(output):
        raise _Mistake(f"{output} is both the requests and the answers: name another file for the answers.")
    if not output.absolute().parent.is_dir():
        raise _Mistake(f"{output}: there is no such directory.")
    if output.exists() and not output.is_file():
        kind = "a directory" if output.is_dir() else "no regular file"
        raise _Mistake(f"{output} is {kind}: name a file for the answers.")
    if not os.access(output if output.exists() else output.absolute().parent, os.W_OK):
        raise _Mistake(f"{output}: this user may not write it.")
    return _Words(source, output, "json" in own, [*flags, *plain], notices)


def _unused(given: Given) -> list[str]:
    """Flags that only a server needs."""
    from headrace.config.flag_table import ADDRESS, BATCHES, FLAG_BY_NAME

    used = [name for name in given.values if FLAG_BY_NAME[name].group in (ADDRESS, BATCHES)]
    return [f"{given.spelled[name]} has no effect: run-batch listens nowhere." for name in used]


def _refused(lines: Sequence[str]) -> int:
    for line in lines:
        print(f"headrace run-batch: {line}", file=sys.stderr)
    return 2


def _run(launch: Launch, words: _Words) -> int:
    import uvloop

    from headrace.cli.batch_progress import BatchProgress
    from headrace.config.errors import ConfigError
    from headrace.server.batch_lines import NotAnOutputFile
    from headrace.server.engine_client import StartupError
    from headrace.server.run import configure_logging
    from headrace.server.run_batch import CannotRun, checked_files, locked, run_batch, unchanged

    configure_logging(launch.server.uvicorn_log_level, own_level="WARNING")
    try:
        with locked(words.output):
            try:
                limit = launch.server.max_body_bytes
                files = asyncio.run(checked_files(words.source, words.output, launch.engine.model, limit))
            except NotAnOutputFile as error:
                return _refused([f"{words.output} belongs to something else: {error}. Name another file for answers."])
            except CannotRun as error:
                return _refused(str(error).splitlines())
            _print_plan(files, launch)
            standing = unchanged(files)
            end: End = "done"
            if files.asked.num_answered < files.asked.num_requests:
                with BatchProgress(sys.stderr) as progress:
                    standing, end = uvloop.run(run_batch(launch.engine, launch.server, files, progress.show))
        if not standing.num_requests:
            words.output.touch(mode=0o600)  # whoever reads the answers finds that there are none
    except (CannotRun, ConfigError, StartupError) as error:
        print(f"headrace run-batch: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        place = error.filename or words.output
        print(f"headrace run-batch: {place}: {error.strerror}. The same command goes on from here.", file=sys.stderr)
        return 1
    return _ended(standing, end, words)


def _print_plan(files: Files, launch: Launch) -> None:
    asked = files.asked
    if not asked.num_requests:
        print(f"{files.source} asks for nothing: it has no line.", file=sys.stderr, flush=True)
        return
    left = asked.num_requests - asked.num_answered
    lines = [f"{files.source}: {asked.num_requests:,} requests for {launch.server.served_model_names[0]}."]
    if asked.num_answered:
        lines.append(f"{files.output} has {asked.num_answered:,} of the answers already; {left:,} are left to do.")
    if files.answered.num_unsaid:
        unsaid = files.answered.num_unsaid
        lines.append(f"{unsaid:,} answers do not say to which request of which model they are: custom_id alone counts.")
    if asked.num_faults and left:
        first = asked.faults[0].message
        lines.append(f"{asked.num_faults:,} lines ask for nothing that can be answered and become errors. {first}")
    if asked.others:
        lines.append(f"Fields of lines without effect: {', '.join(sorted(asked.others)[:20])}.")
    print("\n".join(lines), file=sys.stderr, flush=True)


def _ended(standing: Standing, end: End, words: _Words) -> int:
    """Says how it went; the exit status."""
    if standing.num_requests:
        _say_how_it_went(standing, words)
    if words.as_json:
        summary = {
            "requests": standing.num_requests,
            "answered": standing.num_answered,
            "answered_before": standing.num_before,
            "failed": standing.num_failed,
            "seconds": round(standing.seconds, 3),
            "prompt_tokens": standing.prompt_tokens,
            "generated_tokens": standing.generated_tokens,
            "output_file": str(words.output),
            "end": end,
        }
        print(json.dumps(summary, ensure_ascii=False), flush=True)
    return _STATUS.get(end, 1 if standing.num_failed else 0)


def _say_how_it_went(standing: Standing, words: _Words) -> None:
    left = standing.num_requests - standing.num_answered
    answered_now = standing.num_answered - standing.num_before
    lines = [
        f"{standing.num_answered:,} of {standing.num_requests:,} requests are answered in {words.output}; "
        f"{answered_now:,} now, in {standing.seconds:.1f} s, with {standing.prompt_tokens:,} prompt tokens and "
        f"{standing.generated_tokens:,} generated."
    ]
    if standing.num_failed:
        lines.append(f"{standing.num_failed:,} of them failed: their lines say why.")
    if left:
        lines.append(f"Stopped with {left:,} left: the same command goes on from here.")
    print("\n".join(lines), file=sys.stderr, flush=True)
