"""Optional features. Each is attached by an entry point in pyproject.toml; nothing imports it."""
