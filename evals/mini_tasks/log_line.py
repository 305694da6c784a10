"""Find the failing line among long logs: one request of many failed, and the answer is its id.

A page can be read again, so older outputs can be dropped. The line is not in the first pages.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from evals.mini_tasks.mini_task import World
from evals.mini_tasks.noise import make_code
from evals.mini_tasks.tools import Parameter, Tool

_LOG = "requests.log"
_NUM_PAGES = {"short": 4, "medium": 12, "long": 24}
_FAILING_PAGE = {"short": (3, 3), "medium": (7, 11), "long": (17, 22)}
_NUM_LINES = {"short": (2, 3), "medium": (8, 9), "long": (11, 14)}
_STEPS = ("fetch", "list", "merge", "pack", "sort", "store")
_CAUSES = ("disk full", "no such key", "out of memory", "peer is gone", "time limit")


class LogLine(World):
    """A log in pages."""

    tools = (Tool("read_log", "Read a page of the log.", {"page": Parameter("integer", "from 1 on")}),)

    def __init__(self, rng: random.Random, length: str) -> None:
        failing_page = rng.randint(*_FAILING_PAGE[length])
        self.answer = make_code(rng)
        seconds = rng.randrange(80_000)
        self._pages: list[str] = []
        for number in range(1, _NUM_PAGES[length] + 1):
            num_lines = rng.randint(*_NUM_LINES[length])
            failing_line = rng.randrange(num_lines) if number == failing_page else None
            lines = []
            for idx in range(num_lines):
                seconds += rng.randrange(1, 60)
                lines.append(_line(rng, seconds, self.answer if idx == failing_line else None))
            self._pages.append("\n".join(lines))
        self.prompt = (
            f"{_LOG} has {len(self._pages)} pages. Exactly one request in it ended with `failed:` and a cause; those "
            "that were retried and ended with `ok` did not fail. Submit the id of the request that failed."
        )
        self.reads = tuple(("read_log", {"page": page}) for page in range(1, failing_page + 1))

    def run(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Read a page."""
        page: int = arguments["page"]
        if not 1 <= page <= len(self._pages):
            # Not the number itself: it may have thousands of digits, which Python refuses to write.
            return f"There is no such page. {_LOG} has pages 1 to {len(self._pages)}."
        return self._pages[page - 1]


def _line(rng: random.Random, seconds: int, failing_id: str | None) -> str:
    time = f"{seconds // 3600 % 24:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    start = f"{time} {rng.choice(_STEPS)} request {failing_id or make_code(rng)}"
    milliseconds = rng.randrange(3, 900)
    if failing_id is not None:
        return f"{start} failed: {rng.choice(_CAUSES)}, after {milliseconds} ms"
    retried = f"retried after {rng.choice(_CAUSES)}, " if rng.random() < 0.2 else ""
    return f"{start} {retried}ok in {milliseconds} ms"
