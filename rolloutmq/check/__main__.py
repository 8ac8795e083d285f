"""The process in which checks run, see `rolloutmq.check.contained`."""

from rolloutmq.check.contained import serve
from rolloutmq.own_packages import search_current_folder_last

search_current_folder_last()
serve()
