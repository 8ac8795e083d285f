"""The engine behind an OpenAI-compatible HTTP server."""
