"""`python -m rolloutmq` is the `rolloutmq` command."""

import sys

from rolloutmq.cli import main

if not sys.flags.safe_path:
    # -m searches the current folder first, where a file of the user's could hide a package
    sys.path.append(sys.path.pop(0))
main()
