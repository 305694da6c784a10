"""Goldens of `explain`: of each shipped policy on each recording, ids, counts and token numbers, no text.

`python -m tests.explain.goldens --write` makes them anew; those of recordings that are not here stay as they are.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from leyline_agent.explain import EstimatedMeter, preview, read_conversation
from leyline_agent.policy import load_policy, shipped_policies
from tests.recordings import RECORDINGS

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "explain"
DEMO = Path(__file__).resolve().parents[2] / "evals" / "replay" / "demo_trajectory.json"
TURN_COLUMNS = ("messages", "before", "after", "kept", "moved", "recomputed", "without", "directives")
EDIT_COLUMNS = ("messages", "rule", "action", "message_idxs", "tokens_before", "tokens_after", "mode")


def trajectory_file(name: str) -> Path:
    return DEMO if name == DEMO.stem else RECORDINGS / f"{name}.json"


def golden_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read_golden(name: str) -> dict[str, Any]:
    golden: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return golden


def current(trajectory: Path, policy_name: str) -> dict[str, Any]:
    """Return what `explain` says now."""
    conversation = read_conversation(trajectory)
    previewed = preview(load_policy(policy_name), conversation, EstimatedMeter(conversation))
    turns: list[list[int]] = []
    edits: list[list[Any]] = []
    for turn in previewed.turns:
        reuse = turn.reuse
        end = len(turn.applied.original)
        turns.append(
            [
                end,
                turn.tokens_before,
                reuse.prompt_tokens,
                reuse.kept_tokens,
                reuse.moved_tokens,
                reuse.recomputed_tokens,
                reuse.recomputed_tokens_without_splice,
                len(reuse.changes),
            ]
        )
        edits += [
            [end, m.rule, m.action, list(m.message_idxs), m.tokens_before, m.tokens_after, str(m.mode)]
            for m in turn.applied.new
        ]
    return {"turns": turns, "edits": edits}


def write(name: str, golden: dict[str, Any]) -> None:
    """Write a golden, a row a line."""
    policies = []
    for policy, rows in golden["policies"].items():
        parts = []
        for key, each in rows.items():
            listed = ",\n".join(json.dumps(row) for row in each)
            parts.append(f"{json.dumps(key)}: [\n{listed}\n]" if each else f"{json.dumps(key)}: []")
        policies.append(f"{json.dumps(policy)}: {{\n" + ",\n".join(parts) + "\n}")
    head = f'"turn_columns": {json.dumps(TURN_COLUMNS)},\n"edit_columns": {json.dumps(EDIT_COLUMNS)}'
    text = f'{{\n"counted": "estimate",\n{head},\n"policies": {{\n' + ",\n".join(policies) + "\n}\n}\n"
    (FOLDER / f"{name}.json").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", required=True, help="write tests/golden/explain")
    parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file in [DEMO, *sorted(RECORDINGS.glob("*.json"))]:
        write(file.stem, {"policies": {name: current(file, name) for name in shipped_policies()}})
        print(f"wrote {FOLDER / file.name}")


if __name__ == "__main__":
    main()
