"""Commands that move runs and groups to files and back."""
