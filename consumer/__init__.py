"""The consumer side: the trainer's handle on a run, and a reference trainer."""
