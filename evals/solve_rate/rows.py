"""The rows of a run: one JSON object an episode, in `rows.jsonl`, appended as episodes end."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leyline_agent.errors import LeylineError

SuiteName = Literal["mini_nightmare", "mini_tasks"]
Execution = Literal["none", "reprefill", "splice", "forget"]
AgentName = Literal["langgraph", "debug_gym"]
EpisodeKey = tuple[str, str, str, int, int]
"""Suite, task, arm, seed, repeat."""

ROWS_FILE = "rows.jsonl"

Count = Annotated[int, Field(ge=0)]


class SolveRateError(LeylineError):
    """A run cannot start or cannot go on; the message says what was found, what was expected and what to do."""


class Row(BaseModel):
    """One episode. Tokens are sums over its model calls."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    v: Literal[1] = 1
    run: str
    """Name of the config."""
    suite: SuiteName
    task: str
    paper_subset: bool = False
    """One of the eight mini_nightmare tasks of the paper's setting."""
    arm: str
    """`none`, or policy and execution: `keep_last_tool_outputs/splice`."""
    policy: str
    execution: Execution
    seed: int
    repeat: Count = 0
    """Counts episodes that differ in nothing else."""
    status: Literal["solved", "failed", "error", "skipped"]
    """`error`: the episode could not be carried out, which says nothing of the model; a resumed run does it again."""
    reason: str | None = None
    """Why it is an error or was skipped."""
    ended: Literal["done", "turns", "time", "context", "no_call"] | None = None
    """What ended a solved or failed episode: the agent's own call, its number of turns, its time, a prompt longer than
    the model's context, or answers without a call."""
    score: Count = 0
    max_score: Count = 0
    turns: Count = 0
    """Model calls that were answered."""
    seconds: float = 0.0
    """Model calls and tools, without the scoring."""
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    """As the server reports them, less what splices prefilled themselves."""
    completion_tokens: Count = 0
    prefilled_by_splices: Count = 0
    moved_tokens: Count = 0
    saved_ms: float = 0.0
    """The server's own estimate, where it gives one."""
    turn_ms: tuple[float, ...] = ()
    """From each chat request to its whole answer."""
    splices: Count = 0
    fallbacks: dict[str, int] = {}
    """Notes that were not wholly carried out, by reason."""
    model: str
    agent: AgentName
    scripted: str | None = None
    """Which script stood for the model. No number of such a row says anything about a model."""
    sandboxed: bool | None = None
    """Whether the agent's commands ran in a sandbox without network; None where a task runs no commands."""
    transcript: str | None = None
    """Path below the run's folder."""
    git: str | None = None
    started: str
    """UTC, ISO 8601."""

    @property
    def key(self) -> EpisodeKey:
        """Return what names the episode within its run."""
        return (self.suite, self.task, self.arm, self.seed, self.repeat)


def read_rows(folder: Path | str) -> list[Row]:
    """Return the newest row of each episode, in the order in which they were first written.

    Args:
        folder: a run's folder, or the file itself.

    Raises:
        SolveRateError: there is no such file, or a line of it is no row. A last line without a line feed is what a
            kill leaves behind, and is passed over.
    """
    return list({row.key: row for row in read_every_row(folder)}.values())


def read_every_row(folder: Path | str) -> Iterator[Row]:
    """Yield all rows as `read_rows` does, those of errors that were done again included."""
    file = Path(folder)
    file = file / ROWS_FILE if file.is_dir() else file
    try:
        read = file.read_bytes()
    except OSError as error:
        raise SolveRateError(f"{file}: cannot be read ({error.strerror}); expected the folder of a run") from error
    for number, line in enumerate(read.split(b"\n")[:-1], start=1):
        try:
            yield Row.model_validate(json.loads(line))
        except (ValidationError, ValueError) as error:
            raise SolveRateError(f"{file}:{number}: no row of a run: {error}") from error


class RowsFile:
    """Appends rows, each on the disk before `append` returns. One at a time holds a folder's.

    Raises:
        SolveRateError: another process holds it, or it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / ROWS_FILE
        self._open: IO[bytes] | None = None

    def __enter__(self) -> RowsFile:
        try:
            self._open = self._file.open("ab+")
        except OSError as error:
            raise SolveRateError(f"{self._file}: cannot be written ({error.strerror}); give another --out") from error
        try:
            # The system lets go of it, however this process ends.
            fcntl.flock(self._open, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._open.close()
            raise SolveRateError(
                f"{self._file.parent}: another run is writing to it; wait for it, or give another --out"
            ) from error
        self._drop_torn_line()
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._open is not None
        self._open.close()

    def clear(self) -> None:
        """Forget all rows."""
        assert self._open is not None
        self._open.truncate(0)

    def append(self, row: Row) -> None:
        """Write one row."""
        assert self._open is not None
        line: dict[str, Any] = row.model_dump(mode="json")
        self._open.write((json.dumps(line, ensure_ascii=False) + "\n").encode())
        self._open.flush()
        os.fsync(self._open.fileno())

    def _drop_torn_line(self) -> None:
        """Cut off what a kill left of a row, else the next one would stand on its line."""
        assert self._open is not None
        self._open.seek(0)
        whole = self._open.read()
        self._open.truncate(whole.rfind(b"\n") + 1)
        self._open.seek(0, os.SEEK_END)
