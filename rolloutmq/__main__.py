"""`python -m rolloutmq` is the `rolloutmq` command."""

from rolloutmq.cli import main

main()
