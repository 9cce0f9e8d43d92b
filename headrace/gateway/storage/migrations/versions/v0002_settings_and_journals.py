"""Settings of the database itself, the journals already counted, and the request's id beside its usage."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("usage_events", sa.Column("request_id", sa.Text, nullable=False, server_default=""))
    op.create_table(
        "settings",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )
    op.create_table(
        "replayed_journals",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("replayed_at", sa.Float(53), nullable=False),
    )
