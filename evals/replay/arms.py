"""Run one arm of a replay: a LangGraph agent, a recording transport below it, a row for each request.

- `none`: no policy, no note. Stops once a prompt has passed the limit of tokens.
- `reprefill`: the policy, and the note taken off on the way: plain chat requests of the edited prompts.
- `splice`: the policy and the note.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import openai
from langchain_core.messages import AIMessage
from langgraph.graph import MessagesState

from evals.replay.agent import CallModel, RecordedChatOpenAI, build_agent
from evals.replay.errors import ReplayError
from evals.replay.server_counters import flush_cache, read_counters, settled_counters
from evals.replay.trajectory import Trajectory
from evals.replay.transport import ChatExchange, RecordingTransport
from evals.replay.turn_rows import Arm, ArmResult, TurnRow
from leyline_agent.core.protocol import Outcome
from leyline_agent.integrations.langgraph import with_leyline
from leyline_agent.policy import Policy
from leyline_agent.telemetry import warn_fallback

REQUEST_TIMEOUT_S = 900.0
"""A re-prefill of 40,000 tokens takes minutes on two CPU cores."""

OnTurn = Callable[[TurnRow], None]


@dataclass(frozen=True, slots=True)
class ArmRun:
    """A result together with what was sent, which the ideal is computed from."""

    result: ArmResult
    bodies: tuple[dict[str, Any], ...]


def run_arm(
    arm: Arm,
    trajectory: Trajectory,
    *,
    url: str,
    model: str,
    policy: Policy,
    on_turn: OnTurn,
    max_prompt_tokens: int = 40_000,
    max_turns: int | None = None,
    transport: httpx.BaseTransport | None = None,
) -> ArmRun:
    """Flush the server's cache, replay the trajectory, and read the server's counters before and after.

    Args:
        arm: which of the three.
        trajectory: what to replay.
        url: the server, without `/v1`.
        model: the name that chat requests give.
        policy: what the arms `reprefill` and `splice` edit; not used by `none`.
        on_turn: called with each row as it comes.
        max_prompt_tokens: the arm `none` ends with the first prompt above it.
        max_turns: replay only so many model calls.
        transport: where requests go; by default the network.

    Raises:
        ReplayError: the server refused a request or went away.
    """
    recording = RecordingTransport(transport, strip_note=arm == "reprefill")
    # Its own client, so that flushing and reading counters are not counted among the arm's requests.
    with (
        httpx.Client(base_url=url, timeout=60.0, transport=transport) as admin,
        httpx.Client(transport=recording, timeout=REQUEST_TIMEOUT_S) as http,
    ):
        flush_cache(admin)
        before = read_counters(admin)
        answers = [turn.answer for turn in trajectory.turns]
        chat = RecordedChatOpenAI.replaying(answers, base_url=url, model=model, http=http)
        clock = _Turns(arm, recording, _call_model(arm, chat, policy, trajectory.tools), on_turn, max_prompt_tokens)
        agent = build_agent(trajectory, clock, max_turns=max_turns, stopped=lambda: clock.stopped_at is not None)
        # Two nodes a turn, and LangGraph counts the start as well.
        config = {"recursion_limit": 2 * trajectory.num_turns + 10, "configurable": {"thread_id": arm}}
        agent.invoke({"messages": list(trajectory.opening)}, config)
        server = None
        if before is not None:
            num_rows = len(clock.rows)
            after = settled_counters(admin, lambda now: now.since(before).finished_requests >= num_rows)
            server = after.since(before) if after is not None else None
    bodies = tuple(exchange.body for exchange in recording.exchanges)
    digests = tuple(_digest(body) for body in bodies)
    return ArmRun(ArmResult(arm, tuple(clock.rows), clock.stopped_at, server, digests), bodies)


class _Turns:
    """Wraps the model call: times it, makes its row, and says when to stop."""

    def __init__(
        self, arm: Arm, recording: RecordingTransport, call_model: CallModel, on_turn: OnTurn, max_prompt_tokens: int
    ) -> None:
        self._arm, self._recording, self._call_model = arm, recording, call_model
        self._on_turn, self._max_prompt_tokens = on_turn, max_prompt_tokens
        self.rows: list[TurnRow] = []
        self.stopped_at: str | None = None

    def __call__(self, state: MessagesState) -> AIMessage:
        turn = len(self.rows) + 1
        num_exchanges, num_requests = len(self._recording.exchanges), self._recording.num_requests
        started = time.perf_counter()
        try:
            answer = self._call_model(state)
        except openai.APIStatusError as error:
            raise ReplayError(
                f"arm {self._arm!r}, turn {turn}: the server answered {error.status_code}: {error.message[:400]}. "
                "See its log; a prompt longer than the model's context is one cause"
            ) from error
        except openai.APIConnectionError as error:
            raise ReplayError(
                f"arm {self._arm!r}, turn {turn}: the connection to the server broke ({error.__cause__ or error}); "
                "see its log"
            ) from error
        ms = (time.perf_counter() - started) * 1000
        exchanges = self._recording.exchanges[num_exchanges:]
        row = _row(self._arm, turn, exchanges, ms=ms, num_requests=self._recording.num_requests - num_requests)
        self.rows.append(row)
        self._on_turn(row)
        if self._arm == "none" and row.prompt_tokens > self._max_prompt_tokens:
            self.stopped_at = (
                f"turn {turn}: the prompt has {row.prompt_tokens:,} tokens, more than {self._max_prompt_tokens:,}"
            )
        return answer


def _call_model(arm: Arm, chat: RecordedChatOpenAI, policy: Policy, tools: Sequence[Any]) -> CallModel:
    """Make what the model node calls: the bare model, or the same one with our integration around it."""
    bound = chat.bind_tools(tools) if tools else chat
    if arm == "none":
        return lambda state: bound.invoke(state["messages"])
    # Where the note is taken off there is no outcome, and that is no news.
    on_fallback = _expected if arm == "reprefill" else warn_fallback
    edited = with_leyline(bound, policy, on_fallback=on_fallback, gate="off")
    return lambda state: edited.invoke(state["messages"])


def _expected(reason: str, outcome: Outcome | None) -> None:
    """Stand for the warning of a fall-back."""


def _row(arm: Arm, turn: int, exchanges: Sequence[ChatExchange], *, ms: float, num_requests: int) -> TurnRow:
    if not exchanges:
        raise ReplayError(f"arm {arm!r}, turn {turn}: the agent answered without a chat request; nothing to measure")
    exchange = exchanges[-1]
    outcome = exchange.outcome
    return TurnRow(
        arm=arm,
        turn=turn,
        prompt_tokens=exchange.prompt_tokens,
        reported_cached_tokens=exchange.cached_tokens,
        prefilled_tokens=outcome.prefilled_tokens if outcome else 0,
        ms=ms,
        http_ms=sum(each.http_ms for each in exchanges),
        num_requests=num_requests,
        status=str(outcome.status) if outcome else None,
        reason=str(outcome.reason) if outcome and outcome.reason else None,
        num_directives=outcome.num_directives if outcome else 0,
        moved_tokens=outcome.moved_tokens if outcome else 0,
        splice_ms=outcome.ms if outcome else 0.0,
    )


def _digest(body: dict[str, Any]) -> str:
    prompt = {"messages": body.get("messages"), "tools": body.get("tools")}
    return hashlib.sha256(json.dumps(prompt, sort_keys=True).encode()).hexdigest()
