"""Questions about groups: the language, what an index answers of one, and the walk over what is left."""
