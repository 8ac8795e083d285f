"""Use an OpenAI-compatible HTTP server as engine."""
