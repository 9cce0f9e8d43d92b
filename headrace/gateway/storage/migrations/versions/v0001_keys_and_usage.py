"""Keys with their secrets, usage rows and daily sums, and the counters by which processes see each other's changes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "keys",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("tags", sa.Text, nullable=False),
        sa.Column("plan", sa.Text),
        sa.Column("models", sa.Text, nullable=False),
        sa.Column("rpm", sa.BigInteger),
        sa.Column("tpm", sa.BigInteger),
        sa.Column("concurrency", sa.BigInteger),
        sa.Column("budget_micros", sa.BigInteger),
        sa.Column("budget_period", sa.Text),
        sa.Column("allowed_ips", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("expires_at", sa.Float(53)),
        sa.Column("revoked_at", sa.Float(53)),
    )
    in_use = sa.text("revoked_at IS NULL")
    op.create_index("keys_name_in_use", "keys", ["name"], unique=True, sqlite_where=in_use, postgresql_where=in_use)
    op.create_table(
        "key_secrets",
        sa.Column("digest", sa.Text, primary_key=True),
        sa.Column("key_id", sa.Text, sa.ForeignKey("keys.id"), nullable=False, index=True),
        sa.Column("prefix", sa.Text, nullable=False),
        sa.Column("last4", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("valid_until", sa.Float(53)),
    )
    row_id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "usage_events",
        sa.Column("id", row_id, primary_key=True, autoincrement=True),
        sa.Column("time_s", sa.Float(53), nullable=False, index=True),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("key_name", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("upstream", sa.Text, nullable=False),
        sa.Column("upstream_model", sa.Text, nullable=False),
        sa.Column("endpoint", sa.Text, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("input_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("cost_micros", sa.BigInteger, nullable=False),
        sa.Column("estimated", sa.Boolean, nullable=False),
        sa.Column("stream", sa.Boolean, nullable=False),
        sa.Column("ttft_s", sa.Float(53)),
        sa.Column("total_s", sa.Float(53), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
    )
    op.create_table(
        "usage_days",
        sa.Column("day", sa.Text, primary_key=True),
        sa.Column("key_id", sa.Text, primary_key=True),
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("upstream", sa.Text, primary_key=True),
        sa.Column("key_name", sa.Text, nullable=False),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("failed", sa.BigInteger, nullable=False),
        sa.Column("estimated", sa.BigInteger, nullable=False),
        sa.Column("input_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("cost_micros", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "versions",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.BigInteger, nullable=False),
    )
