"""Keys, limits and usage opened together, in the order in which they need each other.

The order matters once: journals of a killed process are counted before the budgets are read from the sums.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from headrace.gateway.key_index import KeyIndex
from headrace.gateway.key_secrets import check_pepper, load_pepper
from headrace.gateway.keys import KeyStore
from headrace.gateway.limits import Limiter
from headrace.gateway.prompt_log import PromptLog
from headrace.gateway.storage.database import Database, open_database, prepare_data_dir
from headrace.gateway.usage import UsageWriter
from headrace.gateway.usage_queries import spending

JOURNAL_FOLDER = "journal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What one gateway process needs of the database."""

    database: Database
    data_dir: Path
    store: KeyStore
    keys: KeyIndex
    limiter: Limiter
    usage: UsageWriter
    prompts: PromptLog

    def close(self) -> None:
        """Write what is left. Blocks."""
        self.keys.close()
        self.usage.close()
        self.database.close()


def open_store(database_url: str | None, data_dir: str | Path) -> KeyStore:
    """The keys without a running gateway, for commands. Close `store.database` afterwards. Raises ConfigError."""
    folder = prepare_data_dir(data_dir)
    pepper = load_pepper(folder)
    database = open_database(database_url, folder)
    try:
        check_pepper(database, pepper, folder)
    except BaseException:
        database.close()
        raise
    return KeyStore(database, pepper)


def open_ledger(
    database_url: str | None,
    data_dir: str | Path,
    *,
    page: str | None = None,
    retention_days: int | None = None,
    gateways: int = 1,
) -> Ledger:
    """Open all of it, and follow changes of keys from now on. Blocks for some milliseconds. Raises ConfigError."""
    store = open_store(database_url, data_dir)
    database, folder = store.database, prepare_data_dir(data_dir)
    prompts = PromptLog(database)
    usage = UsageWriter(database, folder / JOURNAL_FOLDER, retention_days=retention_days, prompts=prompts)
    keys = KeyIndex(store, page=page)
    keys.start()
    limiter = Limiter(spending(database, time.time()), gateways=gateways)
    usage.report_spending(limiter.spent_elsewhere)
    return Ledger(
        database=database, data_dir=folder, store=store, keys=keys, limiter=limiter, usage=usage, prompts=prompts
    )
