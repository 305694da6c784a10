"""Live CPU servers with the plugin and, beside it, the probe that reads rows and slot counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from evals.serving import serve

from .live import Live

PROBE = Path(__file__).parent / "probe"

SECRET = {"LEYLINE_SECRET": "the probe derives namespaces with this"}


@pytest.fixture(scope="session")
def probe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that, on PYTHONPATH, makes the probe an installed SGLang plugin."""
    folder = tmp_path_factory.mktemp("probe")
    (folder / "leyline_probe.py").write_text((PROBE / "leyline_probe.py").read_text())
    dist = folder / "leyline_probe-0.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: leyline-probe\nVersion: 0\n")
    (dist / "entry_points.txt").write_text("[sglang.srt.plugins]\nleyline_probe = leyline_probe:activate\n")
    return folder


@pytest.fixture(scope="session")
def serve_probed(model_dir: Path, probe_path: Path) -> Callable[..., object]:
    @contextmanager
    def start(*extra_args: str, **env: str) -> Iterator[Live]:
        path = os.pathsep.join(filter(None, [str(probe_path), os.environ.get("PYTHONPATH")]))
        with (
            serve(model_dir, env={"PYTHONPATH": path, **SECRET, **env}, extra_args=extra_args) as server,
            Live(server.url) as live,
        ):
            yield live

    return start


@pytest.fixture(scope="session")
def shared_live(serve_probed: Callable[..., object]) -> Iterator[Live]:
    with ExitStack() as stack:
        yield stack.enter_context(serve_probed())  # type: ignore[arg-type]


@pytest.fixture
def live(shared_live: Live) -> Iterator[Live]:
    """The shared server, emptied before and checked after every test: alive, idle, and no slot lost."""
    shared_live.flush()
    yield shared_live
    shared_live.assert_conserved()
