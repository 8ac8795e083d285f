"""The reference trainer: asynchronous GRPO on one rank or many."""
