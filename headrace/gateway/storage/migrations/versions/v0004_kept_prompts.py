"""Prompts and answers of the keys that ask for it, and how long each key's are kept."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("keys", sa.Column("prompts_kept_s", sa.Float(53)))
    op.create_table(
        "kept_prompts",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("time_s", sa.Float(53), nullable=False),
        sa.Column("ends_at", sa.Float(53), nullable=False),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("endpoint", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("upstream", sa.Text, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("answer", sa.Text, nullable=False),
    )
    op.create_index("ix_kept_prompts_ends_at", "kept_prompts", ["ends_at"])
    op.create_index("ix_kept_prompts_key_id", "kept_prompts", ["key_id"])
