"""The page: what is in it, that it loads nothing, and that it works in a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from leyline_agent.explain import EstimatedMeter, preview, read_conversation
from leyline_agent.explain.page import preview_as_page
from leyline_agent.explain.page_style import STYLE
from leyline_agent.policy import load_policy, parse_policy
from tests.explain.conversations import agent, recorded
from tests.explain.goldens import DEMO

_CHROMIUM = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)
_STUB = 'version: 1\nrules: [{name: r, select: {role: tool, older_than: {turns: 1}}, replace: "[x]"}]'


class _Page(HTMLParser):
    """The articles of a page, by what they say, and every address that it could load from."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.articles: list[dict[str, str]] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.addresses += [value for name, value in given.items() if name in ("src", "href", "data", "srcset")]
        if tag == "article":
            self.articles.append({**given, "text": "", "shown": str("hidden" not in given)})

    def handle_data(self, text: str) -> None:
        if self.articles and "script" not in self.tags:
            self.articles[-1]["text"] += text


def _page(policy: str, messages: list[dict[str, object]]) -> str:
    conversation = recorded(messages)
    return preview_as_page(preview(parse_policy(policy), conversation, EstimatedMeter(conversation)))


def test_the_page_loads_nothing() -> None:
    html = _page(_STUB, agent(4))

    assert _Page(html).addresses == []
    assert not re.search(r"https?://|@import|url\(", html)


def test_a_message_says_at_each_turn_what_becomes_of_it() -> None:
    cards = _Page(_page(_STUB, agent(4))).articles

    # Recomputed when it is new, kept a turn later, and then no more: the stub is, until it is kept for good.
    assert [card["data-states"] for card in cards if "output 0 line 0" in card["text"]] == [".r...", "..rkk"]
    assert [card["data-states"] for card in cards if "step 1" in card["text"]] == ["..mkk"]


def test_what_was_removed_is_struck_through_beside_what_stands_for_it() -> None:
    html = _page(_STUB, agent(3))

    assert re.search(
        r"<ins>\[x\]</ins></pre><details><summary>\d+ characters removed</summary><pre><del>output 0", html
    )


def test_what_a_cut_output_keeps_is_not_struck_through() -> None:
    cut = (
        "version: 1\nrules: [{name: r, select: {role: tool}, truncate: {head: 1 lines, tail: 1 lines, stub: '[cut]'}}]"
    )

    assert "output 0 line 0\n<ins>[cut]</ins>\noutput 0 line 11" in _page(cut, agent(1))


def test_a_dropped_message_stays_visible_as_removed() -> None:
    drop = "version: 1\nrules: [{name: r, select: {role: tool, older_than: {turns: 1}}, drop: true}]"
    cards = _Page(_page(drop, agent(3))).articles

    assert [card["data-states"] for card in cards if "output 0 line 0" in card["text"]] == [".r..", "..xx"]


def test_what_is_forgotten_is_not_in_the_page() -> None:
    policy = """\
version: 1
rules:
  - name: s
    select: {role: [assistant, tool], matches: "key-[0-9]+", older_than: {turns: 1}}
    redact: "[k]"
    mode: forget
  - {name: c, select: {role: tool, superseded: true}, collapse: "[gone]"}
"""
    messages = agent(5)
    messages[1]["content"] = "I say key-111"
    messages[4]["content"] = f"first\nkey-222\n{messages[4]['content']}"
    messages[3]["tool_calls"][0]["function"]["arguments"] = messages[5]["tool_calls"][0]["function"]["arguments"]
    html = _page(policy, messages)

    assert "[k]" in html or "[gone]" in html
    assert "key-1" not in html
    assert "key-2" not in html


def test_text_of_the_conversation_is_no_markup() -> None:
    messages = agent(2)
    messages[2]["content"] = "<script>alert(1)</script>" * 9
    html = _page(_STUB, messages)

    assert "<script>alert" not in html
    assert "&lt;script&gt;alert" in html


def test_the_chart_has_a_bar_for_each_turn_with_its_numbers() -> None:
    conversation = recorded(agent(4))
    previewed = preview(parse_policy(_STUB), conversation, EstimatedMeter(conversation))
    reuse = previewed.turns[3].reuse

    html = preview_as_page(previewed)
    assert html.count('<g class="bar"') == 5
    assert f"turn 4: kept {reuse.kept_tokens}, moved {reuse.moved_tokens}, recomputed {reuse.recomputed_tokens}" in html


def test_it_says_that_numbers_are_estimates() -> None:
    html = _page(_STUB, agent(3))

    assert "Tokens: an estimate" in html
    assert html.count("(estimate)") == 3


@pytest.mark.parametrize(
    ("content", "shown"),
    [(7, "7"), (True, "true"), ({"type": "text", "text": "so"}, "so"), ([None, 7, {"a": 1}], '7\n{"a": 1}')],
)
def test_a_content_of_an_unknown_form_is_shown(content: object, shown: str) -> None:
    (card,) = _Page(_page(_STUB, [{"role": "user", "content": content}])).articles

    assert f"recomputed{shown}\n" in card["text"]


def test_a_conversation_without_requests_has_a_page() -> None:
    assert "of 0</label>" in _page(_STUB, [])


def _luminance(color: str) -> float:
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    ("text", "back", "least"),
    [
        *(("text", back, 4.5) for back in ("page", "card")),
        *(("soft", back, 4.5) for back in ("page", "card")),
        ("removed", "removed-back", 4.5),
        ("replaced", "replaced-back", 4.5),
        # Graphics and bold labels: 3 to 1 is what WCAG asks for those.
        *((part, "card", 3.0) for part in ("moved", "recomputed", "removed", "without", "before")),
    ],
)
def test_colours_can_be_read(scheme: str, text: str, back: str, least: float) -> None:
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")
    colors = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", dark if scheme == "dark" else light))
    lighter, darker = sorted((_luminance(colors[text]), _luminance(colors[back])), reverse=True)

    assert (lighter + 0.05) / (darker + 0.05) >= least


@pytest.fixture(scope="module")
def demo_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    conversation = read_conversation(DEMO)
    previewed = preview(load_policy("keep_last_tool_outputs"), conversation, EstimatedMeter(conversation))
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(preview_as_page(previewed), encoding="utf-8")
    return file


def _chromium(*arguments: str) -> str:
    if _CHROMIUM is None:
        pytest.skip("no Chromium in PATH: the page's script was not run")
    command = [_CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.slow
def test_a_browser_shows_the_turn_that_is_asked_for(demo_page: Path) -> None:
    page = _Page(_chromium("--dump-dom", f"{demo_page.as_uri()}#turn=4"))

    states = {"k": "kept", "m": "moved", "r": "recomputed", "x": "removed"}
    for card in page.articles:
        assert card["class"] == states.get(card["data-states"][3], "")
        assert (card["shown"] == "True") == (card["class"] != "")
    assert {"kept", "moved", "recomputed"} <= {card["class"] for card in page.articles}


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "number"), [("dark", 0), ("light", 1)])
def test_a_browser_paints_it_as_the_reader_prefers(scheme: str, number: int, demo_page: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    shot = tmp_path / "shot.png"
    _chromium(
        f"--blink-settings=preferredColorScheme={number}",
        "--window-size=1000,900",
        f"--screenshot={shot}",
        demo_page.as_uri(),
    )

    pixels = image.open(shot).convert("L")
    assert (pixels.getpixel((2, 2)) < 60) == (scheme == "dark")
    # Text and bars stand out from it.
    darkest, lightest = pixels.getextrema()
    assert lightest - darkest > 150
