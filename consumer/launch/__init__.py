"""`rolloutmq run`: a whole run on this machine, as child processes that are watched and started again."""
