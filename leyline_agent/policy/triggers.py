"""Whether a rule fires at a turn, and what that came from in words."""

from __future__ import annotations

from collections.abc import Callable

from leyline_agent.policy.conditions import When
from leyline_agent.policy.history import History


def fires(when: When, history: History, context_window: int | None) -> bool:
    """Tell whether a trigger is met. `context_window` is given where a trigger needs it."""
    for key, measure in _MEASURES.items():
        least = getattr(when, key)
        if least is not None and measure(history) < least:
            return False
    if when.context is not None and history.tokens < when.context * (context_window or 0):
        return False
    if when.every is not None and not (history.num_turns and history.num_turns % when.every == 0):
        return False
    if when.all_of is not None and not all(fires(part, history, context_window) for part in when.all_of):
        return False
    return when.any_of is None or any(fires(part, history, context_window) for part in when.any_of)


def explain_trigger(when: When, history: History, context_window: int | None) -> str:
    """Say what a trigger compares with what, such as `9,120 of 8,000 tokens`."""
    parts = []
    for key, measure in _MEASURES.items():
        least = getattr(when, key)
        if least is not None:
            parts.append(f"{measure(history):,} of {least:,} {key.replace('_', ' ')}")
    if when.context is not None:
        share = history.tokens / context_window if context_window else 0.0
        parts.append(f"{share:.0%} of {when.context:.0%} of the context window")
    if when.every is not None:
        parts.append(f"turn {history.num_turns}, every {when.every} turns")
    for word, group in (("and", when.all_of), ("or", when.any_of)):
        if group is not None:
            joined = f" {word} ".join(explain_trigger(part, history, context_window) for part in group)
            parts.append(f"({joined})" if len(group) > 1 else joined)
    return " and ".join(parts)


def needs_context_window(when: When | None) -> bool:
    """Tell whether a trigger compares with the context window."""
    if when is None:
        return False
    return when.context is not None or any(
        needs_context_window(part) for part in (*(when.all_of or ()), *(when.any_of or ()))
    )


_MEASURES: dict[str, Callable[[History], int]] = {
    "tokens": lambda history: history.tokens,
    "messages": lambda history: history.num_messages,
    "tool_uses": lambda history: history.num_tool_uses,
    "turns": lambda history: history.num_turns,
}
