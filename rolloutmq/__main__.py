"""`python -m rolloutmq` is the `rolloutmq` command."""

from rolloutmq.cli import main
from rolloutmq.own_packages import search_current_folder_last

search_current_folder_last()
main()
