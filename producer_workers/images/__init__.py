"""Read images of prompts by reference."""
