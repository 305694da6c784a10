"""Selections that are easier to say in Python than in YAML, for `select: {python: …}`.

A detector is given the messages so far, as they were, and returns the indices of those to select. It is asked at every
request of the conversation again, and what was edited once stays so, whatever it returns later. Write your own beside
your agent and name it in `allow_python` when you load the policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from leyline_agent.core.messages import Message
from leyline_agent.policy.turns import read_shape


def stale_tool_calls(messages: Sequence[Message]) -> list[int]:
    """Return the outputs that no longer hold: something was written to a file that they name, or it was read again.

    A call names a file if one of its arguments mentions a path, so `cat src/a.py` and `{"path": "src/a.py"}` are both
    about `src/a.py`. A tool writes if its name says so, such as `edit` or `create_file`.
    """
    shape = read_shape(messages)
    newest: dict[str, list[int]] = {}
    stale: set[int] = set()
    for idx in sorted(shape.call_of):
        call = shape.call_of[idx]
        writes = any(word in call.name.lower() for word in ("write", "edit", "create", "replace", "patch"))
        for path in _paths(call.arguments):
            stale.update(newest.get(path, ()))
            # What a write answers is no view of the file; it does not become stale with the next one.
            newest[path] = [] if writes else [idx]
    return sorted(stale)


def _paths(arguments: str) -> set[str]:
    """Return the words of a call's arguments that look like files."""
    words = arguments.replace('"', " ").replace("'", " ").replace(",", " ").replace("}", " ").split()
    return {word for word in words if "/" in word.strip("/") or "." in word.strip(".")}
