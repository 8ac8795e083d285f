from __future__ import annotations

import random
import re

import pytest

from buffer.errors import ConfigError
from buffer.redis.url import mask_url, open_client

NAMED = r"[?&](?:password|ssl_password|sentinel_password)="
NO_WORD = r"[^\s'\"]*"
WITH_BOTH = re.compile(rf"([^:@/\s'\"]*):(?!//){NO_WORD}{NAMED}{NO_WORD}@{NO_WORD}", re.IGNORECASE)
USER = re.compile(rf"([^:@/\s'\"]*):(?!//){NO_WORD}@")
QUERY = re.compile(rf"({NAMED})[^&\s'\"]+", re.IGNORECASE)
PARTS = (
    *("redis", "://", ":", "//", "/", "@", "a", " ", "'", '"', "?password=", "&", "\n"),
    *("&ssl_password=", "&Sentinel_Password=", "b", "x.y"),
)


def by_expressions(text: str) -> str:
    """The same by the definition, which takes the square of the length, and more."""
    masked = USER.sub(r"\1:***@", WITH_BOTH.sub(r"\1:***", text))
    return QUERY.sub(r"\1***", masked)


def test_what_is_masked_is_as_defined() -> None:
    chance = random.Random(1)
    for _ in range(20_000):
        text = "".join(chance.choices(PARTS, k=chance.randrange(12)))
        assert mask_url(text) == by_expressions(text)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("part", ["a", "a:", "?password=", ":@", "&ssl_password=x:", "a:b "])
def test_long_text_is_masked_in_one_pass(part: str) -> None:
    """Two million characters: the square of that would be no matter of minutes."""
    text = part * (2_000_000 // len(part))
    assert "secret" not in mask_url(f"{text}redis://u:secret@h")


@pytest.mark.parametrize(
    "url",
    ["redis://u:zebra?ss=1&quagga@h/0", "redis://u:zebra?quagga@h", "redis://h?password=zebra&x"],
)
def test_no_part_of_a_password_is_named_as_an_option(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_client(url)
    assert not re.search("zebra|quagga", str(caught.value))
