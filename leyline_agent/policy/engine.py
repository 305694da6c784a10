"""Policy and messages to edits. Pure and deterministic; knows nothing of tokens, servers or YAML.

Two rules hold throughout. A call and its results are never parted. And every decision rests on the conversation as
it happened (ages, pairs, guards), never on what an earlier rule made of it, so that the whole history, given again a
turn later, yields the same edits again and new ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from leyline_agent.core.edits import Edit
from leyline_agent.core.messages import Message
from leyline_agent.core.protocol import Mode
from leyline_agent.policy.schema import Keep, Policy, Rule
from leyline_agent.policy.stub import count_lines, is_stub, parse_stub, render_stub, shorten_args
from leyline_agent.policy.turns import Call, Shape, num_chars, read_shape


def policy_edits(policy: Policy, messages: Sequence[Message]) -> list[Edit]:
    """Return the edits that a policy makes of a message list, for `apply_edits`.

    Give it the whole history as it happened, not one that was edited before: ages and `{lines}` are counted in it.
    The edits are sorted and disjoint, refer to `messages` as given, and leave it untouched.
    """
    draft = _Draft(messages, policy.keep)
    for idx, rule in enumerate(policy.rules):
        selected = draft.select(rule)
        if rule.replace is not None:
            # A later rule's stub is this rule's text too: it replaced ours, and ours must not come back.
            draft.replace(rule, selected, [later.replace for later in policy.rules[idx:] if later.replace is not None])
        elif rule.collapse is not None:
            draft.collapse(rule, rule.collapse, selected)
        elif rule.select.role == "tool":
            draft.drop_results(rule, selected)
        else:
            draft.drop_messages(rule, selected)
    return draft.edits()


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive turns `[start, end)` that became one stub."""

    end: int
    stub: Message
    mode: Mode
    rule: str


class _Draft:
    """A message list while rules go over it. Indices stay those of the original list."""

    def __init__(self, messages: Sequence[Message], keep: Keep) -> None:
        self._original = messages
        self._current: list[Message | None] = list(messages)
        """What is left of each message; None where it is gone, into a run too."""
        self._touched: dict[int, tuple[Mode, str]] = {}
        self._runs: dict[int, _Run] = {}
        self._shape = read_shape(messages)
        self._gone_calls: set[Call] = set()
        self._protected = _protected(messages, self._shape, keep)

    def select(self, rule: Rule) -> list[int]:
        """Return the indices of what is left, matches the rule and is not protected."""
        return [idx for idx, message in enumerate(self._current) if message and self._matches(rule, idx, message)]

    def replace(self, rule: Rule, selected: Iterable[int], stubs: Sequence[str]) -> None:
        """Put a stub in the place of each content. `stubs` are the templates whose text is left alone, ours first."""
        for idx in selected:
            message = self._current[idx]
            assert message is not None
            values = self._stub_values(idx)
            stub = render_stub(stubs[0], values)
            text = message.text
            # A short secret goes like a long one: that a stub saves nothing counts only where saving is the point.
            worthwhile = len(stub) < len(text) or (rule.mode is Mode.FORGET and text)
            if not worthwhile and not _has_other_parts(message):
                continue
            if any(is_stub(template, values, text) for template in stubs if _fits(template, values)):
                continue
            self._put(idx, message.with_text(stub), rule)

    def drop_messages(self, rule: Rule, selected: Iterable[int]) -> None:
        """Drop user or assistant messages, the latter with the results of their calls."""
        age = _turns(rule)
        for idx in selected:
            calls = self._calls_left(idx)
            results = [result for call in calls for result in call.result_idxs]
            if any(not call.result_idxs for call in calls):
                continue
            if any(result in self._protected or self._shape.ages[result] < age for result in results):
                continue
            self._gone_calls.update(calls)
            for gone in (idx, *results):
                self._put(gone, None, rule)

    def drop_results(self, rule: Rule, selected: Sequence[int]) -> None:
        """Drop tool outputs with their calls; an assistant message goes when neither call nor text is left."""
        chosen = set(selected)
        going: dict[int, set[Call]] = defaultdict(set)
        for idx in selected:
            call = self._shape.call_of.get(idx)
            if call is None:
                self._put(idx, None, rule)
            elif chosen.issuperset(call.result_idxs):
                self._put(idx, None, rule)
                going[call.message_idx].add(call)
        for message_idx, calls in going.items():
            message = self._current[message_idx]
            assert message is not None
            left = self._calls_left(message_idx)
            self._gone_calls |= calls
            kept_idxs = [idx for idx, call in enumerate(left) if call not in calls]
            if kept_idxs:
                self._put(message_idx, _with_calls(message, kept_idxs), rule)
            elif message.text.strip():
                self._put(message_idx, message.without_tool_calls(), rule)
            else:
                self._put(message_idx, None, rule)

    def collapse(self, rule: Rule, template: str, selected: Sequence[int]) -> None:
        """Put one stub in the place of each stretch of consecutive turns whose results are all selected."""
        chosen = set(selected)
        stretch: list[tuple[int, int]] = []
        for start in sorted(self._shape.calls):
            end = self._tool_turn_end(start, chosen)
            if end is None:
                continue
            if stretch and not self._is_gap(stretch[-1][1], start):
                self._put_run(rule, template, stretch)
                stretch = []
            stretch.append((start, end))
        if stretch:
            self._put_run(rule, template, stretch)

    def edits(self) -> list[Edit]:
        """Return what was done, as edits of the original list."""
        edits: list[Edit] = []
        at = 0
        for idx in range(len(self._original)):
            if idx < at:
                continue
            run = self._runs.get(idx)
            if run is not None:
                edits.append(Edit(idx, run.end, (run.stub,), run.mode, run.rule))
                at = run.end
            elif idx in self._touched:
                mode, name = self._touched[idx]
                message = self._current[idx]
                edits.append(Edit(idx, idx + 1, () if message is None else (message,), mode, name))
        return edits

    def _matches(self, rule: Rule, idx: int, message: Message) -> bool:
        select = rule.select
        if message.role != select.role or idx in self._protected or self._shape.ages[idx] < _turns(rule):
            return False
        if idx in self._shape.opening and not select.opening:
            return False
        return select.tool is None or any(fnmatchcase(self._tool_name(idx), glob) for glob in select.tool)

    def _tool_name(self, idx: int) -> str:
        call = self._shape.call_of.get(idx)
        return (call.name if call else "") or self._original[idx].name or "tool"

    def _stub_values(self, idx: int) -> dict[str, str]:
        values = {"lines": str(count_lines(self._original[idx].text))}
        if self._original[idx].role == "tool":
            call = self._shape.call_of.get(idx)
            values |= {"tool": self._tool_name(idx), "args": shorten_args(call.arguments if call else "")}
        return values

    def _calls_left(self, idx: int) -> list[Call]:
        return [call for call in self._shape.calls.get(idx, ()) if call not in self._gone_calls]

    def _tool_turn_end(self, start: int, chosen: set[int]) -> int | None:
        """Where a turn ends, if it is an assistant message with results that are all chosen and nothing else."""
        calls = self._calls_left(start)
        if self._current[start] is None or not calls or any(not call.result_idxs for call in calls):
            return None
        results = {result for call in calls for result in call.result_idxs}
        end = max(results) + 1
        others = [idx for idx in range(start + 1, end) if idx not in results]
        if not results <= chosen or not all(self._is_gap(idx, idx + 1) for idx in others):
            return None
        return end

    def _is_gap(self, start: int, end: int) -> bool:
        """Tell whether nothing is left of `[start, end)`, so that its neighbours are consecutive."""
        return all(self._current[idx] is None and idx not in self._runs for idx in range(start, end))

    def _put(self, idx: int, message: Message | None, rule: Rule) -> None:
        self._touched[idx] = (_stronger(rule.mode, self._touched.get(idx)), rule.name)
        self._current[idx] = message

    def _put_run(self, rule: Rule, template: str, stretch: Sequence[tuple[int, int]]) -> None:
        start, end = stretch[0][0], stretch[-1][1]
        taken = [idx for idx in range(start, end) if self._current[idx] is not None]
        lines = sum(count_lines(self._original[idx].text) for idx in taken if self._original[idx].role == "tool")
        stub = render_stub(template, {"turns": str(len(stretch)), "lines": str(lines)})
        if rule.mode is not Mode.FORGET and len(stub) >= sum(num_chars(self._original[idx]) for idx in taken):
            return
        mode = rule.mode
        for idx in range(start, end):
            mode = _stronger(mode, self._touched.get(idx))
            self._current[idx] = None
        # A user message: an assistant message would be the model's own words, which it goes on to imitate, a system
        # message is only allowed first in many chat templates, and a tool message needs a call.
        self._runs[start] = _Run(end, Message.from_openai({"role": "user", "content": stub}), mode, rule.name)


def _protected(messages: Sequence[Message], shape: Shape, keep: Keep) -> frozenset[int]:
    if not keep.last:
        return frozenset()
    outputs = [idx for idx, message in enumerate(messages) if message.role == "tool"]
    observations = [idx for idx, message in enumerate(messages) if message.role == "user" and idx not in shape.opening]
    return frozenset(outputs[-keep.last :] + observations[-keep.last :])


def _turns(rule: Rule) -> int:
    return 0 if rule.select.older_than is None else rule.select.older_than.turns


def _stronger(mode: Mode, earlier: tuple[Mode, str] | None) -> Mode:
    """Let what an earlier rule forgets stay forgotten when a later one edits the same message."""
    return Mode.FORGET if earlier is not None and earlier[0] is Mode.FORGET else mode


def _fits(template: str, values: dict[str, str]) -> bool:
    """Tell whether a template needs nothing but these values; another rule's may be about another role."""
    return all(field is None or field in values for _, field in parse_stub(template))


def _has_other_parts(message: Message) -> bool:
    """Tell whether a content has parts that are no text, such as an image: it is longer than its text says."""
    content = message.raw.get("content")
    if not isinstance(content, Sequence) or isinstance(content, str):
        return False
    return any(not isinstance(part, str) and part.get("type") != "text" for part in content)


def _with_calls(message: Message, kept_idxs: Sequence[int]) -> Message:
    raw = message.to_openai()
    raw["tool_calls"] = [raw["tool_calls"][idx] for idx in kept_idxs]
    return Message.from_openai(raw)
