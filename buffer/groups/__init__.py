"""The life of a group: queue, claim, submit, pools, order, dead letters."""
