"""The tables as they are today. `migrations/versions` leads there from any older state; a test compares the two.

Times are float seconds since 1970 (UTC), money is integer micro-units, days are text (2026-11-29, UTC).
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Float, ForeignKey, Index, Integer, MetaData, Table, Text, text

metadata = MetaData()

ROW_ID = BigInteger().with_variant(Integer(), "sqlite")
"""SQLite counts up by itself only in a column of type INTEGER."""

keys = Table(
    "keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("tags", Text, nullable=False),  # a JSON list of strings, as `models` and `allowed_ips`
    Column("plan", Text),
    Column("models", Text, nullable=False),
    Column("rpm", BigInteger),
    Column("tpm", BigInteger),
    Column("concurrency", BigInteger),
    Column("budget_micros", BigInteger),
    Column("budget_period", Text),
    Column("allowed_ips", Text, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("expires_at", Float(53)),
    Column("revoked_at", Float(53)),
    Column("prompts_kept_s", Float(53)),  # NULL = prompts and answers are not kept
    # Two keys in use never share a name; a revoked key's name is free again.
    Index(
        "keys_name_in_use",
        "name",
        unique=True,
        sqlite_where=text("revoked_at IS NULL"),
        postgresql_where=text("revoked_at IS NULL"),
    ),
)

key_secrets = Table(
    "key_secrets",
    metadata,
    Column("digest", Text, primary_key=True),  # HMAC-SHA-256 in hex; the secret itself is nowhere
    Column("key_id", Text, ForeignKey("keys.id"), nullable=False, index=True),
    Column("prefix", Text, nullable=False),
    Column("last4", Text, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("valid_until", Float(53)),  # set when a rotation replaces it
)

usage_events = Table(
    "usage_events",
    metadata,
    Column("id", ROW_ID, primary_key=True, autoincrement=True),
    Column("time_s", Float(53), nullable=False, index=True),
    Column("key_id", Text, nullable=False),
    Column("key_name", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("upstream", Text, nullable=False),
    Column("upstream_model", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("status", Integer, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("cost_micros", BigInteger, nullable=False),
    Column("estimated", Boolean, nullable=False),
    Column("stream", Boolean, nullable=False),
    Column("ttft_s", Float(53)),
    Column("total_s", Float(53), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("request_id", Text, nullable=False, server_default=""),
)

usage_days = Table(
    "usage_days",
    metadata,
    Column("day", Text, primary_key=True),
    Column("key_id", Text, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("upstream", Text, primary_key=True),
    Column("key_name", Text, nullable=False),
    Column("requests", BigInteger, nullable=False),
    Column("failed", BigInteger, nullable=False),
    Column("estimated", BigInteger, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("cost_micros", BigInteger, nullable=False),
)

versions = Table(
    "versions",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", BigInteger, nullable=False),  # counts up with every change, so that other processes see it
)

settings = Table(
    "settings",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

replayed_journals = Table(
    "replayed_journals",
    metadata,
    Column("name", Text, primary_key=True),  # written with the journal's rows: no journal is counted twice
    Column("replayed_at", Float(53), nullable=False),
)

kept_prompts = Table(
    "kept_prompts",
    metadata,
    Column("id", ROW_ID, primary_key=True, autoincrement=True),
    Column("key_id", Text, nullable=False, index=True),
    Column("time_s", Float(53), nullable=False),
    Column("ends_at", Float(53), nullable=False, index=True),  # the row is removed then
    Column("request_id", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("upstream", Text, nullable=False),
    Column("status", Integer, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("request", Text, nullable=False),
    Column("answer", Text, nullable=False),
)

made_objects = Table(
    "made_objects",
    metadata,
    Column("upstream", Text, primary_key=True),
    Column("id", Text, primary_key=True),  # of a file or a batch, as the upstream calls it
    Column("key_id", Text, nullable=False),
    Column("created_at", Float(53), nullable=False),
)
