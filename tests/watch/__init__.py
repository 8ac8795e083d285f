"""A run seen from outside: what monitoring is told, and what scalers act on."""
