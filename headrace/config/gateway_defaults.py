"""Where the gateway listens and keeps its data unless told otherwise.

Apart from the gateway, so that `headrace up` knows it before the gateway is loaded.
"""

from __future__ import annotations

HOST = "127.0.0.1"
PORT = 8080
DATA_DIR = "~/.headrace"
