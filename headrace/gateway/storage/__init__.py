"""Where the gateway keeps what outlives it: keys and usage, in SQLite or PostgreSQL, one code path for both."""
