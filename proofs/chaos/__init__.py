"""Real processes, a real server, faults between all of them, and a checker that reads only what
clients wrote down.
"""
