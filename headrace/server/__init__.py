"""The HTTP server: requests in, text out. It knows the engine only through messages."""
