"""What `explain` must say of the simpler shipped policies, worked out anew: nothing of the project is imported here.

Policies are stated as they are documented. Those that drop messages or look inside of them are in `content_oracle.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

ROLES = ("tool", "user")
FILE_ARGUMENTS = ("path", "file_path", "file", "filename")
RULES: dict[str, dict[str, Any]] = {
    "none": {"never": True, "stub": ""},
    "keep_last_tool_outputs": {"age": 2, "stub": "[evicted: {tool}, {lines} lines]"},
    "keep_errors": {"age": 2, "errors": True, "stub": "[evicted: {tool} {args}, {lines} lines without an error]"},
    "batched": {"age": 2, "every": 5, "gate": 500, "stub": "[evicted: {tool} {args}, {lines} lines]"},
    "anthropic_clear_tool_uses": {"fires": 100_000, "last": 3, "stub": "[cleared to save context]"},
    "langchain_clear_tool_uses": {"fires": 100_000, "last": 3, "stub": "[cleared]"},
    "opencode_prune": {"age": 2, "last_tokens": 40_000, "gate": 20_000, "stub": "[Old tool result content cleared]"},
    "openhands_observation_masking": {"roles": ROLES, "window": 100, "stub": "<MASKED>"},
    "swe_agent_last_5": {
        **{"roles": ROLES, "every": 5, "last": 5},
        "stub": "Old environment output: ({lines} lines omitted)",
    },
    "superseded_file_views": {
        "superseded": True,
        "stub": "[an older view of this file, {lines} lines; a newer one is below]",
    },
    "head_and_tail": {"cut": 2000, "size": 1500, "stub": "[... {lines} lines, {tokens} tokens cut here ...]"},
    "token_budget": {
        **{"fires": 16_000, "last": 3, "gate": 3000, "stop": 6000, "rereads": True},
        "stub": "[evicted: {tool} {args}, {lines} lines, {tokens} tokens]",
    },
}


@cache
def words(text: str) -> int:
    assert not re.search("[\u2e80-\uffef]", text), "this oracle does not count Chinese, Japanese or Korean"
    num_other = sum(not char.isascii() for char in text)
    return -(-(len(text) - num_other) // 4) + -(-num_other // 2)


@cache
def is_error(text: str) -> bool:
    codes = re.findall(r"(?i)(?:exit(?:ed with)?(?: status| code)?|returncode|exit_code)[:= ]+(\d+)", text[-200:])
    begins = re.match(r"(?i)\s*(<(tool_use_)?error>|\[?(fatal|\w*error|\w*exception)\b)", text)
    return bool(begins) or "Traceback (most recent call last)" in text or bool(codes and int(codes[-1]))


def stub_of(rule: dict[str, Any], text: str, call: dict[str, str]) -> str:
    def fill(gone: str) -> str:
        shown = " ".join(call["arguments"].split())
        shown = shown if len(shown) <= 80 else shown[:79] + "…"
        num_lines = gone.count("\n") + (gone[-1:] not in ("", "\n"))
        filled: str = rule["stub"].format(tool=call["name"], args=shown, lines=num_lines, tokens=words(gone))
        return filled

    if "cut" not in rule:
        return fill(text)
    head, middle, tail = text[: rule["cut"]], text[rule["cut"] : -rule["cut"]], text[-rule["cut"] :]
    return text if words(text) + 4 <= rule["size"] else head + "\n" * (head[-1] != "\n") + fill(middle) + "\n" + tail


def asked(call: dict[str, str], names: tuple[str, ...] = ()) -> tuple[str, str] | None:
    arguments = json.loads(call["arguments"])
    if names:
        arguments = next(([name, arguments[name]] for name in names if name in arguments), None)
    return None if arguments is None else (call["name"], json.dumps(arguments, sort_keys=True))


def expected(name: str, conversation: dict[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the numbers of each request (`goldens.TURN_COLUMNS` but for the directives) and the messages edited."""
    rule, messages = RULES[name], conversation["messages"]
    given = [message["content"] or "" for message in messages]
    role = [message["role"] for message in messages]
    calls = [message.get("tool_calls") or [] for message in messages]
    turns = [role[: idx + 1].count("assistant") for idx in range(len(messages))]
    results = [idx for idx in range(len(messages)) if role[idx] in rule.get("roles", ["tool"]) and turns[idx]]
    # Ids repeat in recordings: the nearest call before a result is meant.
    of = {
        idx: next(
            c["function"]
            for each in reversed(calls[:idx])
            for c in reversed(each)
            if c["id"] == messages[idx]["tool_call_id"]
        )
        if role[idx] == "tool"
        else {"name": "", "arguments": ""}
        for idx in results
    }
    own = [4 + sum(words(c["function"]["name"]) + words(c["function"]["arguments"]) for c in each) for each in calls]
    tools = sum(words(json.dumps(tool, ensure_ascii=False)) for tool in conversation.get("tools") or ())

    def total(texts: list[str], idxs: Any) -> int:
        return sum(own[idx] + words(texts[idx]) for idx in idxs)

    def is_kept(idx: int, end: int) -> bool:
        newer = [other for other in results if idx < other < end and role[other] == role[idx]]
        views = FILE_ARGUMENTS if "superseded" in rule else ()
        return (
            turns[end - 1] - turns[idx] < rule.get("age", 0)
            or idx > end - 1 - rule.get("window", 0)
            or len(newer) < rule.get("last", 0)
            or total(given, [idx, *newer]) <= rule.get("last_tokens", 0)
            or ("errors" in rule and is_error(given[idx]))
            or idx in reread
            or bool(views and not any(
                asked(of[idx], views) and asked(of[idx], views) == asked(of[other], views)
                and not is_error(given[other]) for other in newer
            ))
        )  # fmt: skip

    now, sent, reread = list(given), 0, set[int]()
    edited = set[int]()
    for end in [*(idx for idx in range(1, len(role)) if role[idx] == "assistant"), len(role)]:
        if end == len(role) and role[-1] == "assistant":
            return
        for idx in (idx for idx in results if "rereads" in rule and sent <= idx < end):
            earlier = [other for other in results if other < idx and asked(of[other]) == asked(of[idx])][-1:]
            reread |= {idx for each in earlier if each in reread | edited}
            reread -= set(earlier)
        then, new = list(now), list[int]()
        if turns[end - 1] % rule.get("every", 1) == 0 and tools + total(now, range(end)) >= rule.get("fires", 0):
            for idx in (idx for idx in results if idx < end and "never" not in rule):
                stub = stub_of(rule, given[idx], of[idx])
                if idx not in edited and not is_kept(idx, end) and len(stub) < len(given[idx]):
                    then[idx], new = stub, [*new, idx]
                    if total(now, new) - total(then, new) >= rule.get("stop", 1 << 60):
                        break
        if total(now, new) - total(then, new) < rule.get("gate", 0):
            then, new = list(now), []
        same = [then[idx] == now[idx] for idx in range(sent)]
        prefix = [*same, False].index(False)
        after = tools + total(then, range(end))
        kept = min(tools + total(then, range(prefix)), after - 1) if sent else 0
        moved = min(total(then, [idx for idx in range(prefix, sent) if same[idx]]), after - 1 - kept)
        before = tools + total(given, range(end))
        yield [end, before, after, kept, moved, after - kept - moved, after - kept], new
        now, sent, edited = then, end + 1, edited | set(new)
