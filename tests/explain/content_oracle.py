"""As `oracle.py`, for the policies that drop messages or look inside of them; nothing of the project is imported.

`collapse_repeats` is worked out anew. On no recording do the other three find anything, which is looked for here in
another way than theirs; then a request is what it is without a policy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.explain.oracle import asked, expected, is_error, words

NAMES = ("collapse_repeats", "clear_old_arguments", "drop_reasoning", "secrets")
STUB = "[{turns} earlier calls, repeated below with the same arguments]"
SECRETS = (
    "sk-",
    "sk_",
    "pk-",
    "pk_",
    "rk-",
    "rk_",
    "ghp_",
    "gho_",
    "ghu_",
    "ghs_",
    "ghr_",
    "AKIA",
    "xox",
    "PRIVATE KEY",
)


def has_nothing_for(name: str, messages: list[dict[str, Any]]) -> bool:
    if name == "secrets":
        # Far more than the policy's patterns take; "Bearer" stands in prose as well, so what follows it counts.
        texts = [json.dumps(message) for message in messages]
        bearers = [text.lower().split("bearer ", 1)[1].split()[:1] for text in texts if "bearer " in text.lower()]
        words_of = [word.strip("\"'([{<,:=") for text in texts for word in text.replace("\\n", " ").split()]
        found = [word for word in words_of if word.startswith(SECRETS) and len(word) >= 20]
        return not found and all(len(token) < 20 for tokens in bearers for token in tokens)
    if name == "drop_reasoning":
        keys = {key for message in messages for key in message}
        kinds = {
            part["type"] for message in messages if isinstance(message["content"], list) for part in message["content"]
        }
        return not keys & {"reasoning", "reasoning_content", "thinking"} and "thinking" not in kinds
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    values = [value for call in calls for value in json.loads(call["arguments"]).values()]
    return all(len(value if isinstance(value, str) else json.dumps(value)) <= 500 for value in values)


def runs_of(messages: list[dict[str, Any]]) -> list[list[tuple[int, int]]]:
    """Return the stretches of consecutive turns, as (first message, behind its last), all of whose calls come again."""
    turns = [idx for idx, message in enumerate(messages) if message["role"] == "assistant"]
    made = [[asked(call["function"]) for call in messages[idx].get("tool_calls") or ()] for idx in turns]
    results = [0] * len(turns)
    for number, start in enumerate(turns):
        while start + 1 + results[number] < len(messages) and messages[start + 1 + results[number]]["role"] == "tool":
            results[number] += 1
    # A later call takes the place of an earlier one once it has a result that is no error.
    right = [
        {result["tool_call_id"] for result in messages[start + 1 : start + 1 + num] if not is_error(result["content"])}
        for start, num in zip(turns, results, strict=True)
    ]
    answered = [
        [asked(call["function"]) for call in messages[start].get("tool_calls") or () if call["id"] in ids]
        for start, ids in zip(turns, right, strict=True)
    ]
    again = [
        bool(calls)
        and len(calls) == num
        and all(any(call in later for later in answered[number + 1 :]) for call in calls)
        for number, (calls, num) in enumerate(zip(made, results, strict=True))
    ]
    runs: list[list[tuple[int, int]]] = []
    for start, num, is_gone in zip(turns, results, again, strict=True):
        if is_gone and runs and runs[-1][-1][1] == start:
            runs[-1].append((start, start + num + 1))
        elif is_gone:
            runs.append([(start, start + num + 1)])
    return runs


def expected_collapse(conversation: dict[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield what `oracle.expected` does."""
    messages, role = conversation["messages"], [message["role"] for message in conversation["messages"]]
    tools = sum(words(json.dumps(tool, ensure_ascii=False)) for tool in conversation.get("tools") or ())
    sizes = [
        4 + words(message["content"] or "")
        + sum(words(c["function"]["name"]) + words(c["function"]["arguments"]) for c in message.get("tool_calls") or ())
        for message in messages
    ]  # fmt: skip
    sent: list[tuple[int, int, int]] = []
    for end in [*(idx for idx in range(1, len(role)) if role[idx] == "assistant"), len(role)]:
        if end == len(role) and role[-1] == "assistant":
            return
        # Begin, end and size of what stands in the request.
        runs = [(run[0][0], run[-1][1], 4 + words(STUB.format(turns=len(run)))) for run in runs_of(messages[:end])]
        gone = {idx for start, stop, _ in runs for idx in range(start, stop)}
        now = sorted([*runs, *((idx, idx + 1, sizes[idx]) for idx in range(end) if idx not in gone)])
        prefix = [*(old == new for old, new in zip(sent, now, strict=False)), False].index(False)
        after = tools + sum(size for *_, size in now)
        kept = min(tools + sum(size for *_, size in now[:prefix]), after - 1) if sent else 0
        moved = min(sum(size for *_, size in set(now[prefix:]) & set(sent[prefix:])), after - 1 - kept)
        new = sorted(idx for run in runs if run not in sent for idx in range(run[0], run[1]))
        before = tools + sum(sizes[:end])
        yield [end, before, after, kept, moved, after - kept - moved, after - kept], new
        sent = [*now, *([(end, end + 1, sizes[end])] if end < len(role) else [])]


def expected_of(name: str, conversation: dict[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield what `oracle.expected` does."""
    if name == "collapse_repeats":
        return expected_collapse(conversation)
    assert has_nothing_for(name, conversation["messages"]), (
        f"{name} has something to do here: this oracle cannot say what"
    )
    return expected("none", conversation)
