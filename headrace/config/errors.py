"""The one exception of start-up: something asked for cannot work.

Its message is all a person sees, so it says what was wrong, the number or name that was found, and the value
or flag that would work. It is printed without a stack trace and the process exits with status 2.
"""

from __future__ import annotations


class ConfigError(Exception):
    """A configuration, model file or flag that cannot work; the message carries the advice."""
