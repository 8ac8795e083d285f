"""Config files: how they are read, what is told of a mistake, and the sections that both sides share."""
