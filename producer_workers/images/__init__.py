"""Images of prompts, by reference."""
