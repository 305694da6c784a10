"""Live CPU servers with the plugin and, beside it, the probe that reads rows and slot counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from evals.serving import RunningServer, serve

from .live import Live


@pytest.fixture(scope="session")
def serve_probed(model_dir: Path, probe_env: dict[str, str]) -> Callable[..., AbstractContextManager[Live]]:
    """Start a server of one's own: `with serve_probed("--page-size", "16", LEYLINE_ENABLED="0") as live`."""

    @contextmanager
    def start(*extra_args: str, **env: str) -> Iterator[Live]:
        with (
            serve(model_dir, env=probe_env | env, extra_args=extra_args, fork=True) as server,
            Live(server.url) as live,
        ):
            yield live

    return start


@pytest.fixture(scope="session")
def shared_live(cpu_server: RunningServer) -> Iterator[Live]:
    with Live(cpu_server.url) as live:
        yield live


@pytest.fixture
def live(shared_live: Live) -> Iterator[Live]:
    """The shared server, emptied before and checked after every test: alive, idle, and no slot lost."""
    shared_live.flush()
    yield shared_live
    shared_live.assert_conserved()
