"""Data sets: from files, packages and user code to prompts."""
