"""Measuring a running server from outside: a load generator over HTTP and its report."""
