"""Proxies in front of a scripted server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from leyline_agent import Policy
from tests.proxy.scripted import CHAT, ScriptedUpstream, in_thread, join_proxies, running_proxy


@pytest.fixture(scope="session", autouse=True)
def _proxies_end() -> Iterator[None]:
    yield
    join_proxies()


@pytest.fixture
def stub_old_outputs() -> Policy:
    rule = {"name": "old", "select": {"role": "tool", "older_than": {"turns": 2}}, "replace": "[gone]"}
    return Policy.model_validate({"version": 1, "rules": [rule]})


@pytest.fixture
def no_policy() -> Policy:
    return Policy.model_validate({"version": 1, "rules": []})


@pytest.fixture
def upstream() -> Iterator[ScriptedUpstream]:
    scripted = ScriptedUpstream()
    with in_thread(scripted.serve):
        yield scripted


@pytest.fixture
def start_proxy(upstream: ScriptedUpstream, stub_old_outputs: Policy) -> Iterator[Callable[..., str]]:
    """Starts a proxy before the scripted server; returns its address."""
    with ExitStack() as stack:

        def start(policy: Policy = stub_old_outputs, url: str | None = None, **options: Any) -> str:
            return stack.enter_context(running_proxy(url or upstream.url, policy, **options))

        yield start


@pytest.fixture
def proxy(start_proxy: Callable[..., str]) -> str:
    return start_proxy()


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False, timeout=30, verify=False) as client:
        yield client


@pytest.fixture
def ask(http: httpx.Client, proxy: str) -> Callable[..., httpx.Response]:
    """Sends a chat request through the proxy."""

    def ask(messages: Any, *, to: str = proxy, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return http.post(to + CHAT, json={"model": "m", "messages": messages, **body}, headers=headers or {})

    return ask
