"""Questions about groups: a small query language, its plan and its scan."""
