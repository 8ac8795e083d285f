"""Read prompts from files, packages and user code."""
