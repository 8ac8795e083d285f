"""Connections to the server: URLs, nodes, retries, and commands past the client library."""
