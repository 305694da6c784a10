"""A policy in English, one sentence a rule."""

from __future__ import annotations

from leyline_agent.core.protocol import Mode
from leyline_agent.policy.schema import Policy, Rule, Select

_NOUNS = {"tool": "tool output", "user": "user message", "assistant": "assistant message"}


def explain_policy(policy: Policy) -> str:
    """Return what a policy does, as prose."""
    lines = [policy.name or "A policy without a name"]
    if policy.description:
        lines += ["", policy.description.strip()]
    lines.append("")
    if not policy.rules:
        lines.append("It edits nothing.")
    lines += [f"{number}. {rule.name}: {_sentence(rule)}" for number, rule in enumerate(policy.rules, 1)]
    if policy.keep.last:
        lines.append(f"Kept from all rules: the last {policy.keep.last} results.")
    return "\n".join(lines)


def _sentence(rule: Rule) -> str:
    what = _selection(rule.select)
    if rule.replace is not None:
        act = f"put {rule.replace!r} in the place of the content of every {what}, unless the stub would be longer"
    elif rule.collapse is not None:
        act = f"put one message {rule.collapse!r} in the place of consecutive turns, where every result is a {what}"
    elif rule.select.role == "tool":
        act = f"drop every {what} together with its call"
    elif rule.select.role == "assistant":
        act = f"drop every {what} together with the results of its calls"
    else:
        act = f"drop every {what}"
    after = {
        Mode.AMORTIZE: "What follows keeps its KV, which still reflects the removed text",
        Mode.FORGET: "What follows is prefilled again, so that nothing of it is left",
    }[rule.mode]
    return f"{act}. {after}."


def _selection(select: Select) -> str:
    words = _NOUNS[select.role]
    if select.tool is not None:
        words += f" of {' or '.join(select.tool)}"
    if select.role == "user":
        words += " (the task included)" if select.opening else " (except the task)"
    if select.older_than is not None:
        turns = select.older_than.turns
        words += f" older than {turns} turn{'' if turns == 1 else 's'}"
    return words
