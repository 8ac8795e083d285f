"""One file per section of the configuration, with bounds and defaults."""
