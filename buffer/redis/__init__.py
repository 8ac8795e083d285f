"""The server as one process sees it: connections, keys, scripts, payloads, retries."""
