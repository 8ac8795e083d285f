"""Lower the limits of this process, then become the program.

    sandbox_limiter.py TIME_S MEMORY_MB FILE_MB FILES PROGRAM

It is a program of its own, since code between fork and exec may not run in a process with threads.
"""

from __future__ import annotations

import math
import os
import resource
import sys


def main() -> None:
    """Lower the limits and execute the program."""
    time_s, memory_mb, file_mb, files = (float(word) for word in sys.argv[1:5])
    for limit, value in (
        (resource.RLIMIT_CPU, math.ceil(time_s)),
        (resource.RLIMIT_AS, memory_mb * 2**20),
        (resource.RLIMIT_FSIZE, file_mb * 2**20),
        (resource.RLIMIT_NOFILE, files),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limit)[1]
        most = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
        resource.setrlimit(limit, (most, most))
    # -I: neither the user's packages nor the environment may change the program.
    os.execv(sys.executable, [sys.executable, "-I", *sys.argv[5:]])


main()
