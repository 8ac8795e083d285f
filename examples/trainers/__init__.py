"""Training loops of other projects on a run of this one."""
