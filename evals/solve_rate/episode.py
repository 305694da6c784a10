"""One episode: an environment, an agent, an arm; a row and a transcript come of it."""

from __future__ import annotations

import os
import secrets
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import openai
from langchain_core.messages import SystemMessage, convert_to_openai_messages
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from evals.replay.transport import ChatExchange, RecordingTransport
from evals.replay.turn_rows import FALLBACK_STATUSES, SPLICE_STATUSES
from evals.solve_rate.arms import Arm
from evals.solve_rate.config import Config
from evals.solve_rate.debug_gym_agent import GymAgents, GymFailedError
from evals.solve_rate.environment import Environment, Score, Suite, Task, TaskEntry
from evals.solve_rate.langgraph_agent import EpisodeState, StoppedError, run_agent
from evals.solve_rate.readable_calls import ReadableCalls
from evals.solve_rate.rows import EpisodeKey, Row, SolveRateError
from evals.solve_rate.scripted import RecordedScript, Script, ScriptedTransport, make_script
from evals.solve_rate.stoppable import StoppableTransport
from evals.solve_rate.transcripts import recorded_messages, transcript_name, write_transcript
from leyline_agent.core.protocol import NOTE_KEY

_REQUEST_S = 900.0
_CONTEXT_WORDS = ("context length", "maximum context", "context_length", "longer than the model")
"""What servers say of a prompt that is too long."""


@dataclass(frozen=True, slots=True)
class Plan:
    """An episode to be."""

    entry: TaskEntry
    arm: Arm
    seed: int
    repeat: int

    def key(self, suite: Suite) -> EpisodeKey:
        """Return the key of its row."""
        return (suite.name, self.entry.name, self.arm.name, self.seed, self.repeat)


@dataclass(frozen=True)
class Run:
    """What all episodes of a run share."""

    config: Config
    suite: Suite
    folder: Path
    url: str
    model: str
    is_stopped: Callable[[], bool]
    git: str | None
    recorded: dict[EpisodeKey, Path] = field(default_factory=dict)
    """Transcripts whose answers are given again."""
    gym_agents: GymAgents | None = None
    """For debug-gym's own agent."""


def run_episode(plan: Plan, run: Run) -> Row:
    """Carry out one episode; whatever goes wrong in it is in its row.

    Raises:
        StoppedError: the run is over; nothing was written.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    if plan.entry.skip is not None:
        return _row(plan, run, started, status="skipped", reason=plan.entry.skip)
    episode = _Episode(plan, run)
    try:
        episode.begin()
        episode.play()
        status, reason = ("solved" if episode.score and episode.score.solved else "failed"), None
    except StoppedError:
        raise
    except Exception as error:
        # A run of hours goes on after an episode that broke, whatever broke it; the row says so, and is run again.
        status, reason = "error", f"{type(error).__name__}: {str(error)[:500]}"
        episode.traceback = traceback.format_exc()
    finally:
        episode.close()
    if run.is_stopped() and status == "error":
        # What a stopped run breaks is no error of the episode's.
        raise StoppedError
    transcript = transcript_name(plan.key(run.suite))
    row = _row(
        plan,
        run,
        started,
        status=status,
        reason=reason,
        transcript=transcript,
        seconds=round(episode.seconds, 2),
        ended=None if status == "error" else episode.state.ended,
        **({"score": episode.score.score, "max_score": episode.score.max_score} if episode.score else {}),
        **sums(episode.exchanges),
    )
    write_transcript(
        run.folder / transcript,
        row,
        task=episode.task,
        messages=episode.messages,
        exchanges=episode.exchanges,
        score=episode.score,
        traceback=episode.traceback,
    )
    return row


class _Episode:
    """What is alive while an episode runs, and what is left of it."""

    def __init__(self, plan: Plan, run: Run) -> None:
        self._plan, self._run = plan, run
        # Another one each time: what an earlier run has cached of the same episode is not this one's.
        name = "/".join([run.config.name, *map(str, plan.key(run.suite))])
        self._salt = f"{name}/{secrets.token_hex(8)}"
        self.environment: Environment | None = None
        self.exchanges: list[ChatExchange] = []
        self.state = EpisodeState()
        self.task: Task | None = None
        self.score: Score | None = None
        self.messages: list[dict[str, Any]] = []
        self.seconds = 0.0
        self.traceback: str | None = None

    def begin(self) -> None:
        self.environment = self._run.suite.make(self._plan.entry.name, self._plan.seed)
        self.task = self.environment.reset()

    def play(self) -> None:
        plan, run = self._plan, self._run
        assert self.environment is not None
        begun = time.monotonic()
        inner: httpx.BaseTransport = StoppableTransport(httpx.HTTPTransport(), run.is_stopped)
        if (script := self._script()) is not None:
            inner = ScriptedTransport(inner, script)
        inner = ReadableCalls(inner)
        recording = RecordingTransport(inner, strip_note=plan.arm.execution == "reprefill")
        self.exchanges = recording.exchanges
        with httpx.Client(transport=recording, timeout=_REQUEST_S, trust_env=False) as http:
            try:
                if run.gym_agents is not None:
                    self._play_gym(http)
                else:
                    self._play_langgraph(http)
            except openai.BadRequestError as error:
                if not self._is_too_long(str(error)):
                    raise
                self.state.ended = "context"
            finally:
                self.seconds = time.monotonic() - begun
        self.score = self.environment.score()

    def close(self) -> None:
        if self.environment is not None:
            self.environment.close()

    def _play_langgraph(self, http: httpx.Client) -> None:
        plan, run = self._plan, self._run
        assert self.environment is not None
        assert self.task is not None
        chat = chat_model(run.config, run.url, run.model, self._salt, plan.seed, http)
        try:
            run_agent(
                chat,
                self.environment,
                self.task,
                policy=plan.arm.policy,
                limits=run.config.limits,
                thread_id=self._salt,
                is_stopped=run.is_stopped,
                state=self.state,
            )
        finally:
            messages = [SystemMessage(self.task.system), *self.state.messages]
            converted = convert_to_openai_messages(messages)
            self.messages = converted if isinstance(converted, list) else [converted]

    def _play_gym(self, http: httpx.Client) -> None:
        plan, run = self._plan, self._run
        assert run.gym_agents is not None
        assert self.environment is not None
        settings = request_settings(run.config, self._salt, plan.seed)
        acted = run.gym_agents.play(
            self.environment, plan.arm, http, self._salt, model=run.model, settings=settings, limits=run.config.limits
        )
        self.messages = acted["messages"]
        self.state.ended = acted["ended"]
        if (error := acted["error"]) is None:
            return
        if run.is_stopped():
            raise StoppedError
        if not self._is_too_long(error):
            raise GymFailedError(error)
        self.state.ended = "context"

    def _is_too_long(self, error: str) -> bool:
        """Tell whether the history has outgrown the model. A first prompt that does not fit is the config's mistake."""
        return bool(self.exchanges) and any(words in error.lower() for words in _CONTEXT_WORDS)

    def _script(self) -> Script | None:
        plan, run = self._plan, self._run
        if run.config.model.recorded is not None:
            return RecordedScript(recorded_messages(run.recorded, plan.key(run.suite)))
        if (name := run.config.model.scripted) is None:
            return None
        assert self.environment is not None
        return make_script(name, run.suite.script(name, plan.entry.name, self.environment))


def chat_model(config: Config, url: str, model: str, salt: str, seed: int, http: httpx.Client) -> ChatOpenAI:
    """Return the model of an episode's LangGraph agent."""
    settings = request_settings(config, salt, seed)
    return ChatOpenAI(
        model=model,
        base_url=f"{url}/v1",
        api_key=SecretStr(api_key(config)),
        temperature=settings.get("temperature"),
        top_p=settings.get("top_p"),
        max_completion_tokens=settings["max_tokens"],
        seed=settings["seed"],
        extra_body=settings["extra_body"] or None,
        # A script is asked once for each turn.
        max_retries=0 if _is_scripted(config) else 2,
        streaming=False,
        http_client=http,
        use_responses_api=False,
    )


def request_settings(config: Config, salt: str, seed: int) -> dict[str, Any]:
    """Return what each chat request of an episode says beside its messages and tools."""
    model = config.model
    extra = dict(model.extra_body)
    if config.server.cache_salt:
        extra["cache_salt"] = salt
    said = {"temperature": model.temperature, "top_p": model.top_p}
    chosen = {key: value for key, value in said.items() if value is not None}
    return {**chosen, "max_tokens": model.max_tokens, "seed": seed, "extra_body": extra}


def api_key(config: Config) -> str:
    """Return the server's key.

    Raises:
        SolveRateError: the variable that the config names is not set.
    """
    name = config.model.api_key_env
    if name is None:
        return "none"
    if not (key := os.environ.get(name)):
        raise SolveRateError(f"model.api_key_env: the environment has no {name}; set it to the server's key")
    return key


def sums(exchanges: Sequence[ChatExchange]) -> dict[str, Any]:
    """Return a row's tokens, times and counts of splices."""
    outcomes = [exchange.outcome for exchange in exchanges]
    done = [outcome for outcome in outcomes if outcome is not None]
    prefilled = [outcome.prefilled_tokens if outcome else 0 for outcome in outcomes]
    fallbacks = Counter(
        str((outcome.reason or outcome.status) if outcome else "no_outcome")
        for exchange, outcome in zip(exchanges, outcomes, strict=True)
        if NOTE_KEY in (exchange.body.get("custom_params") or {})
        and (outcome is None or outcome.status in FALLBACK_STATUSES)
    )
    return {
        "turns": len(exchanges),
        "prompt_tokens": sum(exchange.prompt_tokens for exchange in exchanges),
        "cached_tokens": sum(
            max(0, exchange.cached_tokens - own) for exchange, own in zip(exchanges, prefilled, strict=True)
        ),
        "completion_tokens": sum(exchange.completion_tokens for exchange in exchanges),
        "prefilled_by_splices": sum(prefilled),
        "moved_tokens": sum(outcome.moved_tokens for outcome in done),
        "saved_ms": round(sum(outcome.saved_ms or 0.0 for outcome in done), 2),
        "turn_ms": tuple(round(exchange.http_ms, 1) for exchange in exchanges),
        "splices": sum(outcome.status in SPLICE_STATUSES for outcome in done),
        "fallbacks": dict(sorted(fallbacks.items())),
    }


def _is_scripted(config: Config) -> bool:
    return config.model.scripted is not None or config.model.recorded is not None


def _row(plan: Plan, run: Run, started: str, **more: Any) -> Row:
    model = run.config.model
    return Row(
        run=run.config.name,
        suite=run.suite.name,
        task=plan.entry.name,
        paper_subset=plan.entry.paper_subset,
        arm=plan.arm.name,
        policy=plan.arm.policy_name,
        execution=plan.arm.execution,
        seed=plan.seed,
        repeat=plan.repeat,
        model=run.model,
        agent=run.config.agent,
        scripted=model.scripted or ("recorded" if model.recorded is not None else None),
        sandboxed=run.suite.sandboxed,
        git=run.git,
        started=started,
        **more,
    )
