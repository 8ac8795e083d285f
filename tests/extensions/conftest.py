"""The tokenizer and the code of pages, as tests of producer_workers have them."""

from tests.producer_workers.conftest import *  # noqa: F403
