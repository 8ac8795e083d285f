"""A run seen from outside, in numbers: one look, the looks before it, and what monitoring is told of them."""
