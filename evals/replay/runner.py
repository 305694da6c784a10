"""All arms of a replay on one server, and what they leave in a folder."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx

from evals.replay.arms import ArmRun, run_arm
from evals.replay.ideal import IdealTurn, PromptRenderer, PromptSpans, SpanReader, ideal_turn
from evals.replay.local_renderer import LocalRenderer
from evals.replay.progress import ReplayProgress
from evals.replay.report import render_report
from evals.replay.server_facts import ServerFacts, read_facts, warm_up
from evals.replay.trajectory import Trajectory
from evals.replay.turn_rows import ARMS, Arm, ArmResult, TurnRow, summarize
from leyline_agent.policy import Age, Policy, Rule, Select, load_policy

_PACKAGES = ("leyline-agent", "sglang", "torch", "langgraph", "langchain-openai", "openai")


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """What to replay and how."""

    trajectory: Trajectory
    policy: Policy
    arms: tuple[Arm, ...] = ARMS
    max_prompt_tokens: int = 40_000
    max_turns: int | None = None


def keep_last_policy(turns: int, trajectory: Trajectory) -> Policy:
    """Return the policy that keeps the observations of the last `turns` turns.

    In a recording with tool calls they are tool outputs, as in `policies/keep_last_tool_outputs.yaml`; in one without,
    user messages, where the same rule selects that role.
    """
    if trajectory.observed_role == "tool":
        return load_policy("keep_last_tool_outputs").with_turns(turns)
    rule = Rule(
        name="old observations",
        select=Select(role=("user",), older_than=Age(turns=turns)),
        replace="[evicted: {lines} lines]",
    )
    return Policy(version=1, name="keep_last_observations", rules=(rule,))


def replay(request: ReplayRequest, *, url: str, out: Path, progress: ReplayProgress) -> dict[str, Any]:
    """Run the arms one after the other; write `turns.jsonl`, `summary.json` and `report.html` to `out`.

    Returns:
        What `summary.json` holds.

    Raises:
        ReplayError: the server cannot be used, or refused a request.
    """
    out.mkdir(parents=True, exist_ok=True)
    trajectory = request.trajectory
    for line in trajectory.normalized:
        progress.say(f"normalized: {line}")
    with httpx.Client(base_url=url, timeout=60.0) as client:
        facts = read_facts(client)
        warm_up(client, facts.model)
    renderer = _renderer(facts, progress)
    num_turns = min(trajectory.num_turns, request.max_turns or trajectory.num_turns)
    results: list[ArmResult] = []
    rows_file = out / "turns.jsonl"
    rows_file.write_text("", encoding="utf-8")
    for arm in request.arms:
        progress.start_arm(arm, num_turns)
        run = run_arm(
            arm,
            trajectory,
            url=url,
            model=facts.model,
            policy=request.policy,
            on_turn=progress.turn,
            max_prompt_tokens=request.max_prompt_tokens,
            max_turns=request.max_turns,
        )
        result = with_ideal(run, renderer)
        progress.end_arm(arm, result.stopped_at)
        _append_rows(rows_file, result.rows)
        results.append(result)
    summary = make_summary(request, facts, results)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    all_rows = [row for result in results for row in result.rows]
    (out / "report.html").write_text(render_report(summary, all_rows), encoding="utf-8")
    return summary


def with_ideal(run: ArmRun, renderer: PromptRenderer | None) -> ArmResult:
    """Add the ideal to each row of an arm; unchanged without a tokenizer."""
    if renderer is None:
        return run.result
    reader = SpanReader(renderer)
    rows: list[TurnRow] = []
    previous: PromptSpans | None = None
    for row, body in zip(run.result.rows, run.bodies, strict=True):
        spans = reader.spans(body["messages"], body.get("tools") or ())
        rows.append(_with_ideal(row, ideal_turn(previous, spans)))
        previous = spans
    return replace(run.result, rows=tuple(rows))


def make_summary(request: ReplayRequest, facts: ServerFacts, results: Sequence[ArmResult]) -> dict[str, Any]:
    """Put the arms' totals and what they were measured with together."""
    digests = {result.arm: result.prompt_digests for result in results}
    same_prompts = digests["reprefill"] == digests["splice"] if {"reprefill", "splice"} <= digests.keys() else None
    return {
        "arms": {result.arm: summarize(result) for result in results},
        "trajectory": {
            "source": request.trajectory.source,
            "messages": len(request.trajectory.messages),
            "turns": request.trajectory.num_turns,
            "normalized": list(request.trajectory.normalized),
        },
        "policy": {"name": request.policy.name, **request.policy.model_dump(mode="json", exclude_defaults=True)},
        "model": facts.model,
        "server_version": facts.version,
        "same_prompts": same_prompts,
        "max_prompt_tokens": request.max_prompt_tokens,
        "counted_from_turn": 2,
        "versions": _versions(),
    }


def _with_ideal(row: TurnRow, ideal: IdealTurn) -> TurnRow:
    return replace(
        row,
        ideal_cached_tokens=ideal.cached_tokens,
        ideal_prompt_tokens=ideal.prompt_tokens,
        edited_messages=ideal.edited_messages,
        edited_tokens=ideal.edited_tokens,
    )


def _renderer(facts: ServerFacts, progress: ReplayProgress) -> PromptRenderer | None:
    if facts.model_path is None or not Path(facts.model_path).is_dir():
        progress.say(f"no ideal: the model's folder {facts.model_path!r} is not on this machine")
        return None
    return LocalRenderer.from_folder(facts.model_path)


def _append_rows(file: Path, rows: Iterable[TurnRow]) -> None:
    with file.open("a", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(row.to_json()) + "\n")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
