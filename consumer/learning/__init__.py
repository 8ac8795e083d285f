"""What the trained steps of a run say about its learning."""
