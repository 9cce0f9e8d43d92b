"""The flag table for people: `--help` in a terminal, and docs/flags.md.

`--help` shows what has its effect, by purpose; the flags that only keep other servers' commands working are one
paragraph of names, and `--help=all` or `--help=WORD` explains them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from headrace.config.flag_table import FLAGS, GROUPS
from headrace.config.flags import Flag

_COLUMN = 30


def help_text(usage: str, query: str = "", width: int = 100) -> str:
    """The help of `headrace serve`. `query` "" shows the real flags, "all" every flag, else those that match."""
    width = max(60, min(width, 120))
    if query and query != "all":
        found = matching(query)
        if not found:
            return f"No flag speaks of {query}. `headrace serve --help=all` lists every flag.\n"
        return "\n".join([*_rows(found, width), ""])
    lines = [usage, ""]
    for group in GROUPS:
        rows = [flag for flag in FLAGS if flag.group == group and (query == "all" or flag.state == "real")]
        if rows:
            lines += [f"{group}:", *_rows(rows, width), ""]
    if query != "all":
        names = ", ".join(flag.option for flag in FLAGS if flag.state != "real")
        lines += ["Accepted from vLLM's commands (--help=all or --help=WORD explains them):"]
        lines += textwrap.wrap(names, width - 2, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        lines += [""]
    return "\n".join(lines)


def matching(query: str) -> list[Flag]:
    """Flags whose name, group or help speaks of `query`."""
    word = query.lower().lstrip("-").replace("_", "-")
    by_name = [flag for flag in FLAGS if any(word in name for name in (flag.name, *flag.aliases) if len(name) > 3)]
    by_name += [flag for flag in FLAGS if word in flag.aliases and flag not in by_name]
    by_text = [flag for flag in FLAGS if word in f"{flag.group} {flag.help}".lower() and flag not in by_name]
    return by_name + by_text


def default_text(flag: Flag) -> str:
    """The default as one would write it; "" when there is none to speak of."""
    if flag.state != "real" or flag.default in (None, "", ()):
        return ""
    if flag.kind == "switch":
        return "on" if flag.default else "off"
    if isinstance(flag.default, tuple):
        return " ".join(str(part) for part in flag.default)
    return f"{flag.default:g}" if isinstance(flag.default, float) else str(flag.default)


def _rows(flags: Iterable[Flag], width: int) -> list[str]:
    lines: list[str] = []
    for flag in flags:
        switch = f"--[no-]{flag.name}" if flag.kind == "switch" and flag.default is True else flag.option
        shorts = [name for name in flag.spellings[1:] if not name.startswith("--")]
        metavar = flag.metavar if len(flag.metavar) <= 44 else "NAME"
        left = "  " + ", ".join([*shorts, f"{switch} {metavar}".rstrip()])
        default = default_text(flag)
        text = flag.help + (f" [{default}]" if default and flag.kind != "switch" else "")
        right = textwrap.wrap(text, width - _COLUMN - 2)
        if len(left) <= _COLUMN - 2:
            lines.append(f"{left:<{_COLUMN}}{right[0]}")
            right = right[1:]
        else:
            lines.append(left)
        lines += [" " * _COLUMN + part for part in right]
    return lines


_MARKDOWN_HEAD = """\
# Flags

Every flag of `headrace serve`, by what you want to do. `headrace serve --help` shows the same in a terminal,
`--help=WORD` searches it. Underscores may stand for dashes and `--flag=VALUE` for `--flag VALUE`; a flag that is
on or off has a `--no-` form. Sizes: `8k` is 8,000 and `8K` is 8,192. A flag that takes JSON takes single values too:
`--hf-overrides.rope_theta 1e6`. `--config FILE` reads flags from a YAML or TOML file, and the command line wins; in a
file a flag stands once, and only flags of several values take a list.

<!-- Written from the flag table: `python -m headrace.cli.flag_help > docs/flags.md`. -->
"""

_BELONG_TOGETHER = """\
## Which belong together

| you want | set | and mind |
|---|---|---|
| a chat that answers at once | `--max-num-seqs` low (8 to 32), `--step-time-target-ms` | chunked prefill stays on |
| throughput, answers may wait | `--max-num-seqs` high, `--max-num-batched-tokens` high | both take from the KV cache |
| long prompts | `--max-model-len` as needed, chunked prefill on | one request must fit the KV cache |
| many requests with one beginning | `--enable-prefix-caching` (on) | a changed first line is a new beginning |
| less memory | `--max-model-len`, then `--max-num-seqs`, then a quantised model | lower one at a time |
| other machines as clients | `--host 0.0.0.0` with `--api-key` | without a key everybody is let in |
| the same tokens every time | `temperature` 0 or a `seed` in the request | `--dtype float32` is the exact arithmetic |

These conflict, and the start says which to change: `--no-enable-chunked-prefill` with `--max-num-batched-tokens` below
`--max-model-len`; `--max-num-seqs` above `--max-num-batched-tokens`; `--max-model-len` above the model's own limit;
`--quantization` other than the checkpoint's; `--ssl-keyfile` without `--ssl-certfile`.

`--max-model-len` does not decide the size of a block of the KV cache, only how many blocks one request may take.
"""


def flags_markdown() -> str:
    """The text of docs/flags.md."""
    parts = [_MARKDOWN_HEAD, _BELONG_TOGETHER]
    for group in GROUPS:
        rows = [flag for flag in FLAGS if flag.group == group and flag.state == "real"]
        if rows:
            parts.append(
                f"## {group}\n\n| flag | default | what for |\n|---|---|---|\n" + "".join(map(_real_row, rows))
            )
    parts.append(
        "## From other servers' commands\n\n"
        "These are accepted. *Noted* flags let the start go on and print the line given here; *not built yet* stops\n"
        "the start by the feature's name, unless the value asks for nothing.\n"
    )
    for group in GROUPS:
        rows = [flag for flag in FLAGS if flag.group == group and flag.state != "real"]
        if rows:
            parts.append(f"### {group}\n\n| flag | | |\n|---|---|---|\n" + "".join(map(_other_row, rows)))
    return "\n".join(parts)


def _names(flag: Flag) -> str:
    return ", ".join(f"`{name}`" for name in flag.spellings)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _real_row(flag: Flag) -> str:
    choices = f" One of {', '.join(f'`{choice}`' for choice in flag.choices)}." if flag.choices else ""
    example = f" Example: `{flag.option} {flag.example}`." if flag.example else ""
    default = default_text(flag)
    shown = f"`{default}`" if default and flag.kind != "switch" else default
    return f"| {_names(flag)} | {shown} | {_cell(flag.help + choices + example)} |\n"


def _other_row(flag: Flag) -> str:
    words = [f"`{value}`" for value in flag.harmless if value not in ("", True)]
    fine = f" ({' and '.join(words)} {'is' if len(words) == 1 else 'are'} fine)" if words else ""
    state = "noted" if flag.state == "mapped" else "not built yet"
    return f"| {_names(flag)} | {state}{fine} | {_cell(flag.help)} |\n"


if __name__ == "__main__":
    print(flags_markdown(), end="")
