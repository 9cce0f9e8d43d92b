"""Module names that other servers' commands call; each starts the same program as `headrace serve`."""
