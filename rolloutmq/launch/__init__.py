"""`rolloutmq run`: all processes of a run on this machine."""
