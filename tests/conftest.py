"""Fixtures shared by all tests: the generated model and live servers on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports sglang, which on a machine without a GPU cannot even be imported otherwise, and takes seconds
# longer if torch sets up its compiler.
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from evals.models.random_mla import ensure_model
from evals.serving import RunningServer, serve

PROBE = Path(__file__).parent / "server" / "probe"
_SERVER_FIXTURES = ("cpu_server", "unpatched_server")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files that take long first: at the end no worker has one of them while the others have nothing left."""
    takes_long = {item.path for item in items if any(item.iter_markers("sglang")) or any(item.iter_markers("slow"))}
    items.sort(key=lambda item: item.path not in takes_long)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The folder of the random MLA model, generated if absent."""
    return ensure_model()


@pytest.fixture(scope="session")
def probe_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a server that has, beside the plugin, the tests' own plugins (`tests/server/probe`)."""
    folder = tmp_path_factory.mktemp("probe")
    plugins = [path.stem for path in PROBE.glob("leyline_*.py")]
    for name in plugins:
        (folder / f"{name}.py").write_text((PROBE / f"{name}.py").read_text())
    # What an installed distribution has, so that SGLang finds the entry point on PYTHONPATH.
    dist = folder / "leyline_probe-0.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: leyline-probe\nVersion: 0\n")
    entries = [f"{name} = {name}:activate" for name in plugins]
    (dist / "entry_points.txt").write_text("\n".join(["[sglang.srt.plugins]", *entries, ""]))
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "LEYLINE_SECRET": "the probe derives namespaces with this", "LEYLINE_GATE": "0"}


@pytest.fixture(scope="session")
def cpu_server(model_dir: Path, probe_env: dict[str, str]) -> Iterator[RunningServer]:
    """A server with the Leyline plugin, shared by the whole session: use texts or ids of your own."""
    with serve(model_dir, env=probe_env, fork=True) as server:
        yield server


@pytest.fixture(scope="session")
def unpatched_server(model_dir: Path) -> Iterator[RunningServer]:
    """SGLang as published, on the CPU, without the Leyline plugin."""
    with serve(model_dir, plugin=False, fork=True) as server:
        yield server


@pytest.fixture(autouse=True)
def _servers_survive(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test after which a shared server is dead, instead of every later one."""
    servers = [request.getfixturevalue(name) for name in _SERVER_FIXTURES if name in request.fixturenames]
    yield
    for server in servers:
        server.assert_alive()
