"""One page that shows what a policy does to a conversation. It loads nothing: style, script and chart are in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from leyline_agent.core.messages import Message
from leyline_agent.core.protocol import Mode
from leyline_agent.explain.chart import Bar, chart
from leyline_agent.explain.page_style import SCRIPT, STYLE
from leyline_agent.explain.preview import Preview, PreviewTurn
from leyline_agent.explain.text import how_counted, sentence
from leyline_agent.policy import Made, explain_policy

_LEGEND = {
    "kept": "kept: any prefix cache has it",
    "moved": "moved by a splice",
    "recomputed": "recomputed",
    "removed": "removed text",
    "replaced": "what stands in its place",
}
_LINES = {"before": "prompt without the policy", "without": "recomputed without splices"}
_LETTERS = {"kept": "k", "moved": "m", "recomputed": "r"}
_ABSENT, _REMOVED = ".", "x"
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(slots=True)
class _Card:
    """A message as it stands in some prompts: what it was, what is left of it, and its state at each turn."""

    start: int
    end: int
    message: Message | None
    """None where it is gone."""
    made: Made | None
    """What last changed it; None where it is as it came."""
    states: list[str] = field(default_factory=list)


def preview_as_page(preview: Preview) -> str:
    """Return the page as HTML."""
    title = f"{preview.policy_name} on {preview.conversation.source}"
    turns = preview.turns
    # The turn in which most is moved shows most; where nothing is, the last one does.
    shown = max(turns, key=lambda turn: (turn.reuse.moved_tokens, turn.turn)).turn if turns else 0
    forgotten = _forgotten(preview)
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *(
                f'<p class="soft">{escape(line)}</p>'
                for line in explain_policy(preview.policy).splitlines()[1:]
                if line
            ),
            f"<p><b>{escape(how_counted(preview))}</b></p>",
            _numbers(preview),
            "<h2>Each request's prompt</h2>",
            f"<figure>{chart([_bar(turn) for turn in turns], title='Tokens of each prompt, by turn')}"
            f"{_legend({**{k: _LEGEND[k] for k in _LETTERS}, **_LINES, 'replaced': 'a turn with new edits'})}</figure>",
            "<h2>The edited conversation</h2>",
            '<p class="soft">A message that changed at all counts as recomputed as a whole here. What a rule with '
            "<code>mode: forget</code> took away is not shown.</p>",
            f'<div class="picker"><label for="turn">turn <b id="turn-number">{shown}</b> of {len(turns)}</label>'
            f'<input id="turn" type="range" min="1" max="{max(1, len(turns))}" value="{shown}"></div>',
            _legend(_LEGEND),
            *(_card(card, preview, shown, forgotten) for card in _cards(preview)),
            "<h2>What each rule did, and why</h2>",
            _table(preview),
            f"<script>{SCRIPT}</script></body></html>\n",
        ]
    )


def _cards(preview: Preview) -> list[_Card]:
    """Return each message in each form in which it stood in a prompt, in the order of the conversation."""
    cards: dict[tuple[int, int, str], _Card] = {}
    for turn in preview.turns:
        made = {idx: each for each in turn.applied.made for idx in each.message_idxs}
        edits = {edit.start: edit for edit in turn.applied.edits}
        present: list[tuple[int, int, Message | None, str]] = [
            (piece.start, piece.end, piece.message, _LETTERS[state])
            for piece, state in zip(turn.pieces, turn.states, strict=True)
        ]
        present += [(edit.start, edit.end, None, _REMOVED) for edit in edits.values() if not edit.replacement]
        for start, end, message, letter in present:
            text = "" if message is None else json.dumps(dict(message.raw), sort_keys=True, default=str)
            key = (start, end, text)
            if key not in cards:
                cards[key] = _Card(start, end, message, made[start] if start in edits else None)
            states = cards[key].states
            states += _ABSENT * (turn.turn - 1 - len(states))
            states.append(letter)
    for card in cards.values():
        card.states += _ABSENT * (len(preview.turns) - len(card.states))
    return sorted(cards.values(), key=lambda card: (card.start, card.end))


def _forgotten(preview: Preview) -> frozenset[int]:
    """Return the messages of which something is forgotten sooner or later."""
    made = preview.turns[-1].applied.made if preview.turns else ()
    return frozenset(idx for each in made if each.mode is Mode.FORGET for idx in each.message_idxs)


def _card(card: _Card, preview: Preview, shown: int, forgotten: frozenset[int]) -> str:
    originals = preview.conversation.messages[card.start : card.end]
    names = {letter: name for name, letter in _LETTERS.items()} | {_REMOVED: "removed"}
    state = names.get(card.states[shown - 1], "")
    place = f"{card.start}" if card.end == card.start + 1 else f"{card.start} to {card.end - 1}"
    role = originals[0].role if card.message is None else card.message.role
    why = "" if card.made is None else f"<span>{escape(sentence(card.made))}</span>"
    if not forgotten.isdisjoint(range(card.start, card.end)):
        # Only the form that is left in the end: the ones before may have what is to be forgotten.
        text = shown_text(card.message) if card.message is not None and card.states[-1] != _ABSENT else ""
        body = f'<pre><ins>{escape(text)}</ins></pre><p class="soft">What is forgotten is not shown.</p>'
    elif card.made is None:
        assert card.message is not None
        body = f"<pre>{escape(shown_text(card.message))}</pre>"
    else:
        body = _changed("" if card.message is None else shown_text(card.message), originals)
    return (
        f'<article class="{state}" data-states="{"".join(card.states)}"{"" if state else " hidden"}>'
        f'<header><b>{place} {escape(role)}</b><span class="state">{state}</span>{why}</header>{body}</article>'
    )


def _changed(after: str, originals: Sequence[Message]) -> str:
    """Return what is left of a message, and what went; whole lines, but for those that they begin and end with."""
    old = "\n\n".join(shown_text(message) for message in originals).split("\n")
    new = after.split("\n") if after else []
    shorter = min(len(old), len(new))
    head = next((idx for idx in range(shorter) if old[idx] != new[idx]), shorter)
    tail = next((idx for idx in range(shorter - head) if old[-1 - idx] != new[-1 - idx]), shorter - head)
    removed = "\n".join(old[head : len(old) - tail])
    put_in = "\n".join(new[head : len(new) - tail])
    left = [escape(line) for line in new[:head]]
    left += [f"<ins>{escape(put_in)}</ins>"] if put_in else []
    left += [escape(line) for line in new[len(new) - tail :]]
    summary = f"<summary>{len(removed):,} characters removed</summary>"
    return "<pre>" + "\n".join(left) + f"</pre><details>{summary}<pre><del>{escape(removed)}</del></pre></details>"


def shown_text(message: Message) -> str:
    """Return all that a message says: reasoning, text, calls, and that it has parts which are no text."""
    return "\n".join(_texts(message))


def _texts(message: Message) -> Iterator[str]:
    raw = message.raw
    for key in _REASONING_KEYS:
        if isinstance(raw.get(key), str) and raw[key]:
            yield f"({key}) {raw[key]}"
    content = raw.get("content")
    parts = content if isinstance(content, list | tuple) else [content] if content else []
    for part in parts:
        if isinstance(part, str):
            yield part
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            yield part["text"]
        elif part is not None:
            yield json.dumps(part, default=str)[:2000]
    for call in message.tool_calls:
        yield f"{call.name}({call.arguments})"


def _bar(turn: PreviewTurn) -> Bar:
    reuse = turn.reuse
    return Bar(
        reuse.kept_tokens,
        reuse.moved_tokens,
        reuse.recomputed_tokens,
        reuse.recomputed_tokens_without_splice,
        turn.tokens_before,
        bool(turn.applied.new),
    )


def _numbers(preview: Preview) -> str:
    totals = preview.totals()
    kind = "exact" if preview.is_exact else "estimate"
    rows = (
        (f"{totals['edits']:,}", f"edits, in {totals['turns_with_edits']:,} of {totals['turns']:,} turns"),
        (
            f"{totals['last_tokens_before']:,} → {totals['last_tokens_after']:,}",
            f"tokens of the last prompt ({kind})",
        ),
        (f"{totals['recomputed_tokens']:,}", f"tokens to compute in all, with splices ({kind})"),
        (f"{totals['recomputed_tokens_without_splice']:,}", f"the same without splices ({kind})"),
    )
    return '<div class="cards">' + "".join(f"<div><b>{number}</b>{words}</div>" for number, words in rows) + "</div>"


def _legend(entries: Mapping[str, str]) -> str:
    items = (f'<span><i class="{name}"></i>{escape(words)}</span>' for name, words in entries.items())
    return f'<p class="legend">{"".join(items)}</p>'


def _table(preview: Preview) -> str:
    heads = ("turn", "before", "after", "kept", "moved", "anew", "anew without splice", "rules")
    lines = ["<tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]
    for turn in preview.turns:
        reuse = turn.reuse
        words = [sentence(made) for made in turn.applied.new]
        words += [f"{idle.rule}: nothing: {idle.detail}" for idle in turn.applied.idle]
        if reuse.problem is not None:
            words.append(f"cannot be spliced: {reuse.problem}")
        numbers = (
            turn.turn,
            turn.tokens_before,
            reuse.prompt_tokens,
            reuse.kept_tokens,
            reuse.moved_tokens,
            reuse.recomputed_tokens,
            reuse.recomputed_tokens_without_splice,
        )
        cells = "".join(f"<td>{number:,}</td>" for number in numbers)
        lines.append(f"<tr>{cells}<td>{''.join(f'<p>{escape(each)}</p>' for each in words)}</td></tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'
