"""Policy and messages to edits. Pure and deterministic; knows nothing of servers or YAML.

**An edit once made stays made.** A policy is not applied to the conversation as it is, but replayed over it, request
by request: at each one every rule sees what the ones before it left, makes its edits, and those stay. So the same
history, given again a turn later, yields the same edits and new ones, whatever triggers say by then.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from leyline_agent.core.edits import Edit
from leyline_agent.core.messages import Message
from leyline_agent.core.protocol import Mode
from leyline_agent.errors import PolicyError
from leyline_agent.policy.actions import carry_out
from leyline_agent.policy.candidates import RuleState
from leyline_agent.policy.counting import EstimatedTokens, TokenCounter
from leyline_agent.policy.history import History, Item, Run
from leyline_agent.policy.report import Applied, Batch, Idle, WhyIdle
from leyline_agent.policy.schema import Action, Policy
from leyline_agent.policy.triggers import explain_trigger, fires, needs_context_window
from leyline_agent.policy.work import Work

_NO_GAIN: dict[Action, str] = {
    "collapse": "no turn can go: some result is kept or awaited, something else stands there, or a stub saves nothing",
    "drop": "none can go: calls wait for results, or some of their results are kept",
    "truncate": "cutting them saves nothing",
    "clear_arguments": "they have no arguments to clear",
    "drop_reasoning": "they have no reasoning",
    "redact": "the pattern is not found in them",
}

_WITHIN_ITEMS: frozenset[Action] = frozenset({"replace", "truncate", "drop_reasoning", "redact"})
"""Actions that change only what was selected, so that they cannot reclaim more than is in it; others reach from a
result to its call, and from a call to its results."""

Tools = Sequence[Mapping[str, Any]] | None


def policy_edits(
    policy: Policy,
    messages: Sequence[Message],
    *,
    tools: Tools = None,
    counter: TokenCounter | None = None,
    context_window: int | None = None,
) -> list[Edit]:
    """Return the edits that a policy makes of a message list, for `apply_edits`. See `apply_policy`."""
    applied = apply_policy(policy, messages, tools=tools, counter=counter, context_window=context_window)
    return list(applied.edits)


def apply_policy(
    policy: Policy,
    messages: Sequence[Message],
    *,
    tools: Tools = None,
    counter: TokenCounter | None = None,
    context_window: int | None = None,
) -> Applied:
    """Apply a policy to a message list, which is left as it is.

    Give it the whole history as it happened, not one that was edited before: ages, batches and `{lines}` are counted
    in it.

    Args:
        policy: what to do.
        messages: the whole history.
        tools: schemas of the tools, which count in the size of the prompt.
        counter: counts tokens; by default an estimate.
        context_window: tokens that the model can take, instead of the policy's `context_window`.

    Raises:
        PolicyError: a rule compares with the context window and nobody says how large it is, or selects by a function
            that is not allowed.
    """
    return PolicyRun(policy, counter=counter, context_window=context_window).apply(messages, tools=tools)


def request_points(messages: Sequence[Message]) -> list[int]:
    """Return the lengths of the prefixes that were sent as requests: each that an assistant message follows.

    And the whole list, unless it ends with an answer.
    """
    points = [idx for idx, message in enumerate(messages) if idx and message.role == "assistant"]
    if messages and messages[-1].role != "assistant":
        points.append(len(messages))
    return points


class PolicyRun:
    """A policy that is applied to one conversation turn after turn. Any number of threads may use it.

    A list that goes on from the one before costs what is new in it; any other is replayed from its beginning. The
    result is always that of `apply_policy`.

    Raises:
        PolicyError: as `apply_policy`.
    """

    def __init__(
        self, policy: Policy, *, counter: TokenCounter | None = None, context_window: int | None = None
    ) -> None:
        self.policy = policy
        self._counter = counter or EstimatedTokens()
        self._context_window = context_window or policy.context_window
        for rule in policy.rules:
            if self._context_window is None and needs_context_window(policy.when_of(rule)):
                raise PolicyError(
                    f"rule {rule.name!r} fires at a share of the context window, and its size is not known; add "
                    "'context_window: 128000' to the policy, or say it where the policy is used: "
                    "policy.with_context_window(128_000), or --context-window 128000 in a command"
                )
        self._lock = threading.Lock()
        self._seen: list[Mapping[str, Any]] = []
        self._sizes: Mapping[int, int] = {}
        self._tools: Tools = None
        self._replay = _Replay(policy, self._counter, self._context_window, None)
        self._applied: Applied | None = None

    def apply(
        self, messages: Sequence[Message], *, tools: Tools = None, sizes: Mapping[int, int] | None = None
    ) -> Applied:
        """Apply the policy to a message list: the whole history as it happened.

        Args:
            messages: the history.
            tools: as for `apply_policy`.
            sizes: exact numbers of tokens where they are known: `{n: tokens}` of the prompt, edited as it was sent,
                that consists of the first n messages, the last of which is its answer. Rules go by them from there on,
                and count what comes after. The same history needs the same sizes each time.
        """
        sizes = sizes or {}
        with self._lock:
            # Dicts compare much faster than messages, and a message is its dict.
            given = [message.raw for message in messages]
            known = {num: size for num, size in sizes.items() if num <= len(self._seen)} == self._sizes
            if self._applied is not None and known and given == self._seen and tools == self._tools:
                return self._applied
            if not known or not self._goes_on(given, tools):
                self._replay = _Replay(self.policy, self._counter, self._context_window, tools)
                self._seen, self._tools = [], tools
            try:
                self._replay.extend(messages[len(self._seen) :], sizes)
            except BaseException:
                # Half of a turn is in the replay: the next call starts anew.
                self._replay = _Replay(self.policy, self._counter, self._context_window, tools)
                self._seen, self._sizes, self._applied = [], {}, None
                raise
            self._seen = given
            self._sizes = {num: size for num, size in sizes.items() if num <= len(given)}
            self._applied = self._replay.applied(messages)
            return self._applied

    def _goes_on(self, given: list[Mapping[str, Any]], tools: Tools) -> bool:
        """Tell whether a list is the last one and then an answer: only then was the last one a request of its own."""
        num_seen = len(self._seen)
        return (
            num_seen < len(given)
            and given[num_seen].get("role") == "assistant"
            and tools == self._tools
            and given[:num_seen] == self._seen
        )


class _Replay:
    """What has become of a conversation so far."""

    def __init__(self, policy: Policy, counter: TokenCounter, context_window: int | None, tools: Tools) -> None:
        self._policy = policy
        self._context_window = context_window
        self._states = [RuleState.of(policy, idx) for idx in range(len(policy.rules))]
        self._runs: list[list[Run]] = [[] for _ in policy.rules]
        self._stubs = [
            [later.replace for later in policy.rules[idx:] if later.replace is not None]
            for idx in range(len(policy.rules))
        ]
        self._history = History(counter, rereads=any(state.keep.rereads for state in self._states))
        tools_tokens = counter.count_tools(tools) if tools else 0
        self._history.tokens += tools_tokens
        self._history.tokens_before += tools_tokens
        self._edits: dict[int, Edit] = {}
        self._batches: list[Batch] = []
        self._idle: list[tuple[str, WhyIdle, str]] = []
        self._last_request = 0

    def extend(self, messages: Sequence[Message], sizes: Mapping[int, int]) -> None:
        """Take further messages, and make the edits of each request that was sent among them."""
        history = self._history
        for message in messages:
            if message.role == "assistant":
                self._request(explains=False)
            for item in history.append(message).items:
                if item.call is not None and item.call.gone_by is not None:
                    self._follow(item, *item.call.gone_by)
                for state in self._states:
                    state.arrive(item)
            exact = sizes.get(len(history.slots))
            if exact is not None:
                history.tokens_before += exact - history.tokens
                history.tokens = exact
        self._request()

    def applied(self, messages: Sequence[Message]) -> Applied:
        """Return what has come of it."""
        edits = tuple([self._edits[idx] for idx in sorted(self._edits)])
        history = self._history
        return Applied(
            turn=history.num_turns,
            original=tuple(messages),
            edits=edits,
            idle=tuple(Idle(*row) for row in self._idle),
            tokens_before=history.tokens_before,
            tokens_after=history.tokens,
            counted=history.counter.name,
            batches=tuple(self._batches),
            num_batches_before=self._num_batches_before(),
        )

    def _request(self, *, explains: bool = True) -> None:
        """Let every rule make its edits, if anything came since the last request.

        Why a rule made none is for the report of this request; nobody asks for that of one long ago.
        """
        if len(self._history.slots) == self._last_request:
            return
        self._last_request = len(self._history.slots)
        self._idle = []
        for state in self._states:
            if not (explains or state.pending or state.detector):
                continue
            reason = self._edit(state, explains)
            if reason is not None and explains:
                self._idle.append((state.rule.name, *reason))

    def _num_batches_before(self) -> int:
        """Count the batches before the last request; of results that followed a call away they came with it."""
        num_batches = len(self._batches)
        while num_batches and self._batches[num_batches - 1].turn == self._history.num_turns:
            num_batches -= 1
        return num_batches

    def _edit(self, state: RuleState, explains: bool) -> tuple[WhyIdle, str] | None:
        """Let one rule make its edits; return why it made none."""
        history = self._history
        if state.when is not None and not fires(state.when, history, self._context_window):
            compared = explain_trigger(state.when, history, self._context_window) if explains else ""
            return "trigger", f"trigger not met: {compared}"
        candidates, kept = state.candidates(history)
        if not candidates:
            if kept:
                return "kept", f"what it selects is kept: {kept}"
            return "nothing_selected", "nothing in the conversation is selected that was not edited before"
        gate = state.keep.min_reclaim_tokens
        if gate is not None:
            # Cheaper than to try, and mostly so: what is there does not suffice.
            most = self._most_reclaimed(state, candidates)
            if most < gate:
                return "below_min_reclaim", f"would reclaim less than {most:,} of {gate:,} tokens"
        runs = list(self._runs[state.idx])
        history.settle(reversible=gate is not None)
        work = Work(state, history, self._stubs[state.idx], state.rule, runs)
        fired = "" if state.when is None else f"; fired: {explain_trigger(state.when, history, self._context_window)}"
        carry_out(work, candidates)
        if not work.units and not work.collapsed:
            state.dismiss(work.done)
            return (
                "no_gain",
                f"{len(candidates)} selected, and {_NO_GAIN.get(state.action, 'a stub saves nothing')}",
            )
        if gate is not None and work.reclaimed_tokens < gate:
            reclaimed = work.reclaimed_tokens
            history.take_back()
            return "below_min_reclaim", f"would reclaim {reclaimed:,} of {gate:,} tokens"
        history.settle()
        state.dismiss(work.done)
        self._runs[state.idx] = runs
        self._record(work, fired)
        return None

    def _most_reclaimed(self, state: RuleState, candidates: Sequence[Item]) -> int:
        """Return how many tokens cannot be exceeded by what a rule reclaims, without trying it."""
        history = self._history
        if state.action in _WITHIN_ITEMS:
            return sum(history.item_tokens(item) for item in candidates)
        idxs = {item.message_idx for item in candidates}
        for item in candidates:
            if item.call is not None:
                idxs.add(item.call.message_idx)
            for call in item.calls:
                idxs.update([history.items[number].message_idx for number in call.result_idxs])
        runs = sum(run.tokens for run in self._runs[state.idx])
        return runs + sum(history.slots[idx].tokens for idx in idxs)

    def _took(self, batch: Batch) -> None:
        """Take down what was done."""
        self._batches.append(batch)
        for idx in batch.before:
            self._note(idx)

    def _record(self, work: Work, fired: str) -> None:
        """Take down what a rule did, and how each message that it touched stands now."""
        history, rule, slots = self._history, work.rule, self._history.slots
        why = f" (rule: {work.state.what}){fired}"
        after = {idx: (slots[idx].current, slots[idx].tokens) for idx in work.before}
        collapsed = [
            (item, range(run.start, run.end), [*stubs, *(work.before[idx] for idx in taken)], (run.stub, run.tokens))
            for item, run, taken, stubs in work.collapsed
        ]
        action = work.state.action
        self._took(
            Batch(rule.name, action, rule.mode, history.num_turns, why, work.units, work.before, after, collapsed)
        )
        for _, run, _, _ in work.collapsed:
            # A run that went into another one began somewhere else.
            for edit in [edit for edit in self._edits.values() if run.start < edit.start < run.end]:
                del self._edits[edit.start]

    def _note(self, idx: int) -> None:
        """Bring the edit of a message up to date."""
        slot = self._history.slots[idx]
        run = slot.run
        if run is not None:
            self._edits.pop(idx, None)
            self._edits[run.start] = Edit(run.start, run.end, (run.stub,), run.mode, run.rule)
        elif slot.mode is not None:
            left = () if slot.current is None else (slot.current,)
            self._edits[idx] = Edit(idx, idx + 1, left, slot.mode, slot.rule)

    def _follow(self, item: Item, rule: str, action: Action, mode: Mode) -> None:
        """Take a result away whose call is gone: it came late, and would be left over."""
        history = self._history
        slot = history.slots[item.message_idx]
        idx = item.message_idx
        before = {idx: (slot.current, slot.tokens)}
        history.settle()
        history.write(item, None)
        slot.mode, slot.rule = mode, rule
        after = {idx: (slot.current, slot.tokens)}
        why = "; its call is gone already, and a result does not stay without it"
        self._took(Batch(rule, action, mode, history.num_turns, why, [(item, [idx])], before, after))
