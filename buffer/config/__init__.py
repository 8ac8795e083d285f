"""The configuration file: every section, its defaults, and its error messages."""
