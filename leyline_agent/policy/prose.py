"""A policy in English, one sentence a rule."""

from __future__ import annotations

from leyline_agent.core.protocol import Mode
from leyline_agent.policy.conditions import Keep, When
from leyline_agent.policy.schema import ClearArguments, Policy, Rule
from leyline_agent.policy.selecting import IndexRange, Select, Superseded

_NOUNS = {
    "tool": "tool output",
    "user": "user message",
    "assistant": "assistant message",
    "system": "system message",
}


def explain_policy(policy: Policy) -> str:
    """Return what a policy does, as prose."""
    lines = [policy.name or "A policy without a name"]
    if policy.description:
        lines += ["", policy.description.strip()]
    lines.append("")
    if not policy.rules:
        lines.append("It edits nothing.")
    lines += [f"{number}. {rule.name}: {_sentence(rule)}" for number, rule in enumerate(policy.rules, 1)]
    if policy.when is not None:
        lines.append(f"Rules fire when {_trigger(policy.when)}.{_except(policy, 'when')}")
    if policy.keep != Keep():
        lines.append(f"Kept from all rules: {_guards(policy.keep)}.{_except(policy, 'keep')}")
    return "\n".join(lines)


def describe_selection(select: Select) -> str:
    """Return what a selection is about, in words."""
    words = " or ".join(_NOUNS[role] for role in select.role)
    if select.tool is not None:
        words += f" of {' or '.join(select.tool)}"
    if select.exclude_tool is not None:
        words += f" of tools other than {' or '.join(select.exclude_tool)}"
    if "user" in select.role:
        words += " (the task included)" if select.opening else " (except the task)"
    if select.is_error:
        words += " that reports an error"
    if select.superseded is not None:
        same = "arguments"
        if isinstance(select.superseded, Superseded):
            same = " or ".join(select.superseded.argument)
        words += f" whose call was made again later with the same {same}"
    for what, globs in (("with the id", select.id), ("with the tag", select.tag)):
        if globs is not None:
            words += f" {what} {' or '.join(globs)}"
    if select.index is not None:
        words += f" {_place(select.index)}"
    if select.larger_than is not None:
        words += f" of more than {select.larger_than.tokens:,} tokens"
    if select.matches is not None:
        words += f" in which {select.matches!r} is found"
    if select.python is not None:
        words += f" that {select.python} selects"
    if select.older_than is not None:
        words += f" older than {_counted(select.older_than.turns, 'turn')}"
    return words


def _sentence(rule: Rule) -> str:
    what = describe_selection(rule.select)
    act = _act(rule, what)
    if rule.when is not None:
        act += f", when {_trigger(rule.when)}"
    if rule.keep is not None and rule.keep != Keep():
        act += f", but keep {_guards(rule.keep)}"
    after = {
        Mode.AMORTIZE: "What follows keeps its KV, which still reflects the removed text",
        Mode.FORGET: "What follows is prefilled again, so that nothing of it is left",
    }[rule.mode]
    return f"{act}. {after}."


def _act(rule: Rule, what: str) -> str:
    if rule.replace is not None:
        return f"put {rule.replace!r} in the place of the content of every {what}, unless the stub would be longer"
    if rule.collapse is not None:
        return f"put one message {rule.collapse!r} in the place of consecutive turns, where every result is a {what}"
    if rule.truncate is not None:
        ends = [(rule.truncate.head, "first"), (rule.truncate.tail, "last")]
        kept = " and ".join(f"the {end} {amount}" for amount, end in ends if amount is not None)
        return f"keep {kept} of every {what} and put {rule.truncate.stub!r} in the place of the rest"
    if rule.clear_arguments is not None:
        which = "the arguments"
        if isinstance(rule.clear_arguments, ClearArguments):
            which = f"arguments longer than {rule.clear_arguments.longer_than}"
        whose = "the call of every" if rule.select.role == ("tool",) else "the calls of every"
        return f"clear {which} of {whose} {what}"
    if rule.drop_reasoning is not None:
        return f"remove the reasoning of every {what}"
    if rule.redact is not None:
        return f"put {rule.redact!r} in the place of each match in every {what}"
    if rule.select.role == ("tool",):
        return f"drop every {what} together with its call"
    if rule.select.role == ("assistant",):
        return f"drop every {what} together with the results of its calls"
    return f"drop every {what}"


def _trigger(when: When) -> str:
    parts = []
    if when.tokens is not None:
        parts.append(f"the prompt has {when.tokens:,} tokens or more")
    if when.messages is not None:
        parts.append(f"the prompt has {_counted(when.messages, 'message')} or more")
    if when.tool_uses is not None:
        parts.append(f"{_counted(when.tool_uses, 'tool output')} or more are unshortened")
    if when.turns is not None:
        parts.append(f"there are {_counted(when.turns, 'turn')} or more")
    if when.context is not None:
        parts.append(f"the prompt takes {when.context:.0%} or more of the context window")
    if when.every is not None:
        parts.append("a turn begins" if when.every == 1 else f"the number of turns is a multiple of {when.every}")
    if when.all_of is not None:
        parts.append(" and ".join(_grouped(part) for part in when.all_of))
    if when.any_of is not None:
        parts.append("(" + " or ".join(_grouped(part) for part in when.any_of) + ")")
    return " and ".join(parts)


def _grouped(when: When) -> str:
    words = _trigger(when)
    return f"({words})" if " and " in words and not words.startswith("(") else words


def _guards(keep: Keep) -> str:
    parts = []
    for number, first, noun in (
        (keep.last, "the last", "result"),
        (keep.last_turns, "the last", "turn"),
        (keep.last_tokens, "the last", "token"),
        (keep.first, "the first", "result"),
    ):
        if number:
            of_results = " of results" if noun == "token" else ""
            parts.append(f"{first} {_counted(number, noun)}{of_results}")
    if keep.errors:
        parts.append("outputs that report an error")
    if keep.tagged is not None:
        parts.append(f"what is tagged {' or '.join(keep.tagged)}")
    if keep.rereads:
        parts.append("what was asked for again after it had been edited away")
    if keep.min_reclaim_tokens is not None:
        parts.append(f"everything until {keep.min_reclaim_tokens:,} tokens can go at once")
    if keep.stop_after_tokens is not None:
        parts.append(f"the rest once {keep.stop_after_tokens:,} tokens went")
    return ", ".join(parts) or "nothing"


def _except(policy: Policy, key: str) -> str:
    """Name the rules that do not heed the policy's `when` or `keep`."""
    names = [rule.name for rule in policy.rules if rule.mode is Mode.FORGET or getattr(rule, key) is not None]
    return f" Not so: {', '.join(names)}." if names else ""


def _place(index: int | IndexRange) -> str:
    if isinstance(index, int):
        return f"at place {index} of the list"
    return f"at places {index.from_} to {index.to} of the list"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
