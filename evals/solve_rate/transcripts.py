"""Transcripts: what was said in an episode. `leyline explain` and `python -m evals.replay` read them too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evals.replay.transport import ChatExchange
from evals.solve_rate.environment import Score, Task
from evals.solve_rate.rows import EpisodeKey, Row

TRANSCRIPTS = "transcripts"
"""Their folder, below the run's."""


def transcript_name(key: EpisodeKey) -> str:
    """Return where an episode's transcript lies, below the run's folder."""
    _, task, arm, seed, repeat = key
    return f"{TRANSCRIPTS}/{task}.{arm.replace('/', '-')}.{seed}.{repeat}.json"


def write_transcript(
    file: Path,
    row: Row,
    *,
    task: Task | None,
    messages: Sequence[Mapping[str, Any]],
    exchanges: Sequence[ChatExchange],
    score: Score | None,
    traceback: str | None,
) -> None:
    """Write what an episode was; the messages are the agent's own history, which policies do not edit."""
    turns = [
        {
            "prompt_tokens": exchange.prompt_tokens,
            "cached_tokens": exchange.cached_tokens,
            "completion_tokens": exchange.completion_tokens,
            "ms": round(exchange.http_ms, 1),
            "outcome": exchange.outcome.model_dump(mode="json", exclude_defaults=True) if exchange.outcome else None,
        }
        for exchange in exchanges
    ]
    whole = {
        "source": f"{row.run}: {row.suite} {row.task}, {row.arm}, seed {row.seed}, repeat {row.repeat}",
        "messages": messages,
        "tools": task.tools if task else [],
        "turns": turns,
        "score": _as_dict(score),
        "traceback": traceback,
        "row": row.model_dump(mode="json"),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all, whenever a kill comes.
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(whole, indent=1, ensure_ascii=False), encoding="utf-8")
    unfinished.replace(file)


def recorded_messages(transcripts: Mapping[EpisodeKey, Path], key: EpisodeKey) -> list[dict[str, Any]]:
    """Return the conversation of the same episode in an earlier run, of the arm `none` where the arm was not there.

    Raises:
        ValueError: the earlier run has neither.
    """
    suite, task, arm, seed, repeat = key
    for wanted in (arm, "none"):
        if (file := transcripts.get((suite, task, wanted, seed, repeat))) is not None:
            messages: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["messages"]
            return messages
    raise ValueError(f"the recorded run has no episode of {task}, seed {seed}, repeat {repeat}, to give again")


def _as_dict(score: Score | None) -> dict[str, Any] | None:
    if score is None:
        return None
    names = ("score", "max_score", "solved", "tests_changed", "said")
    return {name: getattr(score, name) for name in names if hasattr(score, name)}
