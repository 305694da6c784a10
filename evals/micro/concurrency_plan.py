"""What `evals.micro.concurrency` is to measure: cells, their conversations, the order of runs, how long it will take.

Knows no server; `dry_run` shows what would be sent to one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from evals.micro.conversations import MARK_TOKENS, Conversation, Renderer, make_conversation
from evals.micro.recorded_steps import WorkloadError, read_recordings
from leyline_agent.policy import load_policy

PREFILL_MS, COLD_MS_PER_TOKEN, DECODE_MS = 100.0, 0.085, 8.0
"""What a turn's prefill, a token of a base and a step of decoding are taken to last before anything was measured: about
what an H200 takes for 16,384 tokens with DeepSeek-V2-Lite's shapes."""


_LEAST_CONVERSATIONS = 12


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """What is held fixed while arms are compared."""

    prompt_tokens: int
    concurrency: int
    keep_turns: int

    def __str__(self) -> str:
        return f"{self.prompt_tokens}:{self.concurrency}:{self.keep_turns}"

    @property
    def num_conversations(self) -> int:
        """How many there are to choose from: with few at once, each repeat takes others."""
        return max(self.concurrency, _LEAST_CONVERSATIONS)

    @property
    def lengths(self) -> tuple[int, int]:
        """What conversations are made by; those of a cell are the first of those of a larger one."""
        return self.prompt_tokens, self.keep_turns

    def as_json(self) -> dict[str, int]:
        """Return it as rows have it."""
        return {"prompt_tokens": self.prompt_tokens, "concurrency": self.concurrency, "keep_turns": self.keep_turns}


@dataclass
class Workload:
    """The conversations of all cells, made as they are needed."""

    options: argparse.Namespace
    _made: dict[tuple[int, int], list[Conversation]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Here and not at the top: results are summarised where there is no tokenizer.
        from evals.models.random_mla import train_tokenizer

        self._recordings = read_recordings(self.options.trajectories)
        self._renderer = Renderer(train_tokenizer())

    def of_repeat(self, cell: Cell, repeat: int) -> list[Conversation]:
        """Return those that a repeat runs, the same for each arm. Raises as `of`."""
        conversations = self.of(cell)
        first = repeat * cell.concurrency
        return [conversations[(first + idx) % len(conversations)] for idx in range(cell.concurrency)]

    def of(self, cell: Cell) -> list[Conversation]:
        """Return the conversations of a cell, which those of fewer are the first of.

        Raises:
            WorkloadError: they cannot be made, or the policy edits nothing in measured turns.
        """
        made = self._made.setdefault(cell.lengths, [])
        policy = load_policy("keep_last_tool_outputs").with_turns(cell.keep_turns)
        for number in range(len(made), cell.num_conversations):
            made.append(
                make_conversation(
                    self._recordings,
                    self._renderer,
                    policy,
                    number=number,
                    seed=self.options.seed,
                    prompt_tokens=cell.prompt_tokens,
                    turns=self.options.turns,
                )
            )
        taken = made[: cell.num_conversations]
        if not any(conversation.stubbed[-1] - conversation.stubbed[0] for conversation in taken):
            raise WorkloadError(
                f"cell {cell}: the policy edits nothing in {self.options.turns} turns; keep fewer turns, or raise "
                "--prompt-tokens or --turns"
            )
        return taken

    def digest(self, cell: Cell) -> str:
        """Return what tells one workload from another: the base and the stubs of the cell's conversations."""
        parts = [[c.prompt(0, [], edits=True).ids, sorted(c.stubbed[-1]), c.ends] for c in self.of(cell)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def run_s(cell: Cell, turns: int, output_tokens: int) -> float:
    """Return how long a run is taken to last before any was: prefills one after the other, decoding side by side."""
    return (cell.concurrency * PREFILL_MS + turns * (cell.concurrency * PREFILL_MS + output_tokens * DECODE_MS)) / 1e3


def base_s(cell: Cell, conversations: int) -> float:
    """Return how long it is taken to last to prefill the bases of so many conversations."""
    return conversations * cell.prompt_tokens * COLD_MS_PER_TOKEN / 1e3


def schedule(cell: Cell, options: argparse.Namespace) -> Iterator[tuple[int, str]]:
    """Yield repeats and arms of a cell in the order in which they are run."""
    for repeat in range(options.repeats):
        rng = random.Random(f"{options.seed} {cell} {repeat}")
        for arm in rng.sample(options.arms, len(options.arms)):
            yield repeat, arm


def expected_total_s(left: Mapping[Cell, Sequence[tuple[int, str]]], options: argparse.Namespace) -> float:
    """Return how long the runs that are left are taken to last, with warm-up and bases."""
    total = 0.0
    num_based: dict[tuple[int, int], int] = {}
    for cell, runs in left.items():
        if not runs:
            continue
        total += len(runs) * run_s(cell, options.turns, options.output_tokens)
        total += len(options.arms) * run_s(cell, min(options.warm_up_turns, options.turns), options.output_tokens)
        before = num_based.get(cell.lengths, 0)
        total += base_s(cell, max(0, cell.num_conversations - before))
        num_based[cell.lengths] = max(before, cell.num_conversations)
    return total


def dry_run(workload: Workload, cells: Sequence[Cell], options: argparse.Namespace) -> str:
    """Return a table of what would be sent: means over turns and conversations."""
    head = ("cell", "base", "turn 1", "last turn", "edits a turn", "removed", "moved", "new", "ideal: splice")
    lines: list[tuple[str, ...]] = [(*head, "re-prefill", "none")]
    mark = [0] * MARK_TOKENS
    for cell in cells:
        conversations = workload.of(cell)
        answers = [[0], *([0] * options.output_tokens for _ in range(options.turns))]
        turns = range(1, options.turns + 1)
        prompts = [[c.prompt(turn, answers, mark, edits=True) for turn in turns] for c in conversations]
        plain = [c.prompt(turn, answers, mark, edits=False) for c in conversations for turn in turns]
        flat = [prompt for of_one in prompts for prompt in of_one]
        tokens = sum(len(prompt.ids) for prompt in flat)

        def mean(values: Sequence[int]) -> float:
            return sum(values) / len(values)

        lines.append(
            (
                str(cell),
                f"{mean([len(c.prompt(0, [], edits=True).ids) for c in conversations]):,.0f}",
                *(f"{mean([len(of_one[at].ids) for of_one in prompts]):,.0f}" for at in (0, -1)),
                f"{mean([prompt.num_edits for prompt in flat]):.2f}",
                f"{mean([prompt.removed_tokens for prompt in flat]):,.0f}",
                f"{mean([prompt.ideal_tokens - prompt.left_tokens for prompt in flat]):,.0f}",
                f"{mean([len(prompt.ids) - prompt.ideal_tokens for prompt in flat]):,.0f}",
                f"{100 * sum(prompt.ideal_tokens for prompt in flat) / tokens:.2f}%",
                f"{100 * sum(prompt.left_tokens for prompt in flat) / tokens:.2f}%",
                f"{100 * sum(p.ideal_tokens for p in plain) / sum(len(p.ids) for p in plain):.2f}%",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(part.rjust(width) for part, width in zip(line, widths, strict=True)) for line in lines)


def parse_cell(text: str) -> tuple[int, int, int | None]:
    """Read LENGTH:C or LENGTH:C:N, for argparse."""
    parts = text.split(":")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3) or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected LENGTH:C or LENGTH:C:N, such as 16384:8:2")
    return numbers[0], numbers[1], numbers[2] if len(numbers) == 3 else None


def chosen_cells(options: argparse.Namespace) -> list[Cell]:
    """Return the cells that the options ask for, in order."""
    if options.cells is None:
        return [
            Cell(length, concurrency, keep)
            for keep in options.keep_turns
            for length in options.prompt_tokens
            for concurrency in options.concurrency
        ]
    given = [
        Cell(length, concurrency, keep)
        for length, concurrency, own in options.cells
        for keep in (options.keep_turns if own is None else [own])
    ]
    return list(dict.fromkeys(given))
