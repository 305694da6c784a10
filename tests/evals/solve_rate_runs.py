"""Runs of the solve-rate harness, as its tests make them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from evals.solve_rate.config import Config, parse_config
from evals.solve_rate.debug_gym_tasks import GYM_PYTHON, find_data
from evals.solve_rate.episode import Plan
from evals.solve_rate.rows import EpisodeKey, Row, SolveRateError, read_rows
from evals.solve_rate.runner import Finished, Stop, run


class Quiet:
    """Remembers what a run tells."""

    def __init__(self) -> None:
        self.planned: list[Plan] = []
        self.before: list[Row] = []
        self.rows: list[Row] = []

    def begin(self, plans: Sequence[Plan], done: Sequence[Row], *, is_sandboxed: bool | None) -> None:
        self.planned, self.before = list(plans), list(done)

    def tick(self, running: Sequence[Plan], *, tokens: int, seconds: float) -> None:
        pass

    def row(self, row: Row) -> None:
        self.rows.append(row)


def a_config(**more: Any) -> Config:
    said = {"version": 1, "name": "test", "suite": {"type": "mini_tasks", "lengths": ["short"]}}
    return parse_config({**said, "model": {"scripted": "solver"}, **more}, where="the test")


def play(
    config: Config,
    folder: Path,
    url: str,
    watcher: Quiet | None = None,
    stop: Stop | None = None,
    *,
    fresh: bool = False,
) -> Finished:
    return run(config, folder, url, watcher or Quiet(), stop or Stop(), fresh=fresh)


def rows_of(folder: Path) -> dict[EpisodeKey, Row]:
    return {row.key: row for row in read_rows(folder)}


@contextmanager
def a_server(
    *, model: str = "m", message: dict[str, Any] | None = None, is_gone: list[str] | None = None
) -> Iterator[str]:
    """Yield the address of what lists a model and gives one answer; with `is_gone`, once it was asked nothing else.

    For what a run does with its folder, whatever a server says; prompts, caches and times are tested with a real one.
    """
    answer = {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": model,
        "choices": [{"index": 0, "finish_reason": "stop", "message": message or {"role": "assistant", "content": "?"}}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8},
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(404 if is_gone or self.path != "/v1/models" else 200, {"data": [{"id": model}]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            if is_gone is None:
                self._say(200, answer)
            else:
                is_gone.append(self.path)
                self._say(503, {"error": {"message": "going away"}})

        def _say(self, status: int, said: dict[str, Any]) -> None:
            body = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def needs_debug_gym() -> Path:
    """Return the tasks' folder; skip where debug-gym cannot run."""
    if not GYM_PYTHON.exists():
        pytest.skip("no .venv-debug-gym: `make debug-gym` creates it, with a Python 3.12")
    try:
        return find_data(None)
    except SolveRateError as error:
        pytest.skip(str(error))
