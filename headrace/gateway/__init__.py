"""One address and one key for many upstreams: routing, fallback, keys, limits, usage."""
