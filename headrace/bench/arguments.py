"""What arguments of the benchmarks may be: types for argparse, which names the flag before what they say."""

from __future__ import annotations

import math
import os
from argparse import ArgumentTypeError
from pathlib import Path


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of one at least")
    return int(text)


def counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a time in seconds above 0")
    return value


def can_be_written(file: Path) -> bool:
    return not file.is_dir() and os.access(file.absolute().parent, os.W_OK)


def new_file(text: str) -> Path:
    path = Path(text)
    if not can_be_written(path):
        raise ArgumentTypeError(f"no file can be written at {text}")
    return path
