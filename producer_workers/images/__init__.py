"""Images of prompts: from what a row names to files of the group, and from these to what an engine shows its model."""
