"""Which key made which file or batch: the upstream sees one account, its own key, and cannot tell them apart.

Files and batches are rare and large, so a look into the database in a thread costs nothing that is noticed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from sqlalchemy import select

from headrace.gateway.storage import tables
from headrace.gateway.storage.database import Database
from headrace.protocol.errors import ApiError


class Owner:
    """One key at one upstream."""

    def __init__(self, database: Database, key_id: str, upstream: str) -> None:
        self._database = database
        self._key_id = key_id
        self._upstream = upstream

    async def check(self, id: str) -> None:
        """Raises ApiError 404 unless the key made it: whether another key did is nobody's business."""
        if id not in await self.own([id]):
            raise ApiError(404, f"There is no {id[:80]} here.", code="not_found", param="id")

    async def own(self, ids: Sequence[str]) -> frozenset[str]:
        """Those of `ids` that the key made."""
        return await asyncio.to_thread(self._own, ids) if ids else frozenset()

    async def made(self, ids: Sequence[str]) -> None:
        """From now on they are the key's, unless they are another's."""
        if ids:
            await asyncio.to_thread(self._made, ids)

    def _own(self, ids: Sequence[str]) -> frozenset[str]:
        made = tables.made_objects
        question = select(made.c.id).where(
            made.c.upstream == self._upstream, made.c.key_id == self._key_id, made.c.id.in_(ids)
        )
        with self._database.read() as connection:
            return frozenset(connection.execute(question).scalars())

    def _made(self, ids: Sequence[str]) -> None:
        now_s = time.time()
        rows = [{"upstream": self._upstream, "id": id, "key_id": self._key_id, "created_at": now_s} for id in ids]
        statement = self._database.insert(tables.made_objects)
        with self._database.write() as connection:
            connection.execute(statement.on_conflict_do_nothing(index_elements=["upstream", "id"]), rows)
