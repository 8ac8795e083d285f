"""Where prompts come from: data sets with random access, and the order in which they are drawn."""
