from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from buffer.ids import group_id
from buffer.redis.server.embedded import EmbeddedServer
from buffer.wire.group import RolloutGroup
from consumer.grpo.reporting.metric_writers import SampleWriter
from consumer.handle.sample_log import TokenTexts, describe_sample
from rolloutmq.web.report import write_report
from tests.rolloutmq.populate import Scene, write_steps
from tests.rolloutmq.web.test_page import PATIENCE_S, go, turn

GID = group_id("math", 1)
GOOD = "It is **five**, since $2 + 3 = 5$."

ALL = "return document.querySelector('main').textContent"

ORDINARY = (
    "**Step 1: think**\n\nWe know that $x^2 = 4$, so `x` is 2.\n\n- first *item* of it\n- second, with **bold**\n"
    "  - inner one\n\n1. one\n2. two\n\nMore words follow, in a paragraph of ordinary length.\n\n```python\nx = 1\n```\n\n"
) * 80
"""As long as Markdown is rendered."""

Sampled = Callable[..., None]


@pytest.fixture
def sampled(scene: Scene, server: EmbeddedServer) -> Iterator[Sampled]:
    """Returns what writes a sample log with one group: a rollout for each of the texts."""
    folder = server.folder

    def write(*texts: str, prompt: object = "2 + 3?") -> None:
        write_steps(folder, [(1, "l1", [GID])])
        state = scene.run.buffer.read(scene.taken).states[0]
        state.messages = [{"role": "user", "content": prompt, "tool_calls": {"not": "a list"}}]
        states = [
            state.model_copy(update={"index": n, "response": text}) for n, text in enumerate(texts)
        ]
        writer = SampleWriter(folder, 2**30, 1)
        group = RolloutGroup(GID, "math", states)
        writer.write_samples(1, [describe_sample(group, 1, "best", 0, TokenTexts([]))])
        writer.close()

    yield write
    shutil.rmtree(folder / "samples", ignore_errors=True)
    (folder / "steps.jsonl").unlink(missing_ok=True)


def said_in(chromium: Chrome, count: int) -> list[str]:
    """Return what each rollout of the group shows, below its title."""
    found = (By.CSS_SELECTOR, ".member .said")
    WebDriverWait(chromium, PATIENCE_S).until(lambda b: len(b.find_elements(*found)) >= count)
    script = "return [...document.querySelectorAll('.member')].map((m) => [...m.querySelectorAll('.said')].map((s) => s.textContent).join(''))"
    return [str(text) for text in chromium.execute_script(script)]


def rendered_in(chromium: Chrome) -> list[bool]:
    script = "return [...document.querySelectorAll('.member')].map((m) => Boolean(m.querySelector('.rendered strong') && m.querySelector('math')))"
    return list(chromium.execute_script(script))


LONG = 19_800  # characters, as far as Markdown is rendered
TOO_DEEP_OR_LONG = [
    sign * (LONG // len(sign))
    for sign in (
        *("> ", "1. ", "*a_", "*a**b", "_*", "a*", "[", "![", "`a``", "~~a", "<a ", "$$", "$a$"),
        *("x\n\n", "- a\n", "* a\n  ", "a\n-\n", "|a|b|\n", "```\n", "www.a ", "\\(", "[[]"),
    )
] + [
    "".join("> " * n + "x\n" for n in range(60)),
    "".join("  " * n + "- x\n" for n in range(60)),
    "[" * 5_000 + "x" + "](y)" * 3_000,
    "$" + "{" * 900 + "x" + "}" * 900 + "$ " + "\\frac{" * 300,
    '<tool_call>{"name": "f", "arguments": ' + "[" * 5_000 + "]" * 5_000 + "}</tool_call>",
    "<think></think>" * 3_000,
]


def test_no_text_of_a_rollout_keeps_a_reader_from_the_others(
    chromium: Chrome, address: str, sampled: Sampled, server: EmbeddedServer, tmp_path: Path
) -> None:
    texts = [ORDINARY, *(text + "END" for text in TOO_DEEP_OR_LONG), GOOD]
    sampled(*texts, prompt=TOO_DEEP_OR_LONG[0] + "ASKED")
    assert write_report(server.folder, tmp_path / "report.html")
    go(chromium, address, f"groups/{GID}?step=1")
    for page in (None, (tmp_path / "report.html").as_uri()):
        if page:
            chromium.get(f"{page}#/groups/{GID}?step=1")
        shown = said_in(chromium, len(texts))
        assert len(shown) == len(texts)
        assert [text.strip().endswith("END") for text in shown[1:-1]] == [True] * len(
            TOO_DEEP_OR_LONG
        )
        assert [rendered_in(chromium)[n] for n in (0, -1)] == [True, True]
        assert "ASKED" in chromium.execute_script(ALL)


SHOWN_AS_TEXT = {
    "[note]: https://a.test 'lie to the user'": "lie to the user",
    'see [this](https://a.test "and that")': 'https://a.test "and that"',
    "```python and obey\nx = 1\n```": "python and obey",
    "| a | b |\n|---|---|\n| 1 | 2 | in no column |": "in no column",
    "<!-- said in secret -->": "said in secret",
    "a&#8203;b&ZeroWidthSpace;c": "a⟨U+200B⟩b⟨U+200B⟩c",
    "a\u200bb\u00adc\u034fd\u115fe\u3164f\u2800g": "a⟨U+200B⟩b⟨U+00AD⟩c⟨U+034F⟩d⟨U+115F⟩e⟨U+3164⟩f⟨U+2800⟩g",
    "tag \U000e0061\U000e007f": "⟨U+E0061⟩⟨U+E007F⟩",
    "one\ufe0ftwo\U000e0100\u180e": "one⟨U+FE0F⟩two⟨U+E0100⟩⟨U+180E⟩",
    "a\u200db\u200cc": "a⟨U+200D⟩b⟨U+200C⟩c",
    "\u2062\ufff9x\u2028y\u0085": "⟨U+2062⟩⟨U+FFF9⟩x⟨U+2028⟩y⟨U+0085⟩",
    "$a \\phantom{unseen} b$": "unseen",
    "$$\na % a comment\n b\n$$": "a comment",
    "$\\def\\x{a definition} a$": "a definition",
}
STAYS = [
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 and \u2764\ufe0f\u200d\U0001f525 and 1\ufe0f\u20e3",
    "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
    "\u0915\u094d\u200d\u0937",
    "tabs\tstay",
]


def test_what_markdown_or_a_font_would_hide_is_shown(
    chromium: Chrome, address: str, sampled: Sampled
) -> None:
    sampled(*SHOWN_AS_TEXT, *STAYS)
    go(chromium, address, f"groups/{GID}?step=1")
    shown = said_in(chromium, len(SHOWN_AS_TEXT) + len(STAYS))
    for expected, text in zip(SHOWN_AS_TEXT.values(), shown, strict=False):
        assert expected in text
    for expected, text in zip(STAYS, shown[len(SHOWN_AS_TEXT) :], strict=True):
        assert expected in text
    turn(chromium, f"groups/{GID}?step=1&view=text")
    text = "".join(said_in(chromium, 1))
    assert "⟨U+E0061⟩" in text
    assert "\u200d\U0001f469" in text
