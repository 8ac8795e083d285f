"""One short story for each invariant that a script enforces, and the mutations of the scripts that
must break it.
"""
