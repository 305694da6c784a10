"""debug-gym's own agent, with a policy and notes: its client speaks to `leyline proxy`, which speaks to a relay here.

    debug-gym's agent ──► proxy: policy, notes ──► relay ──► server
    (its own process)     (one an arm)             (counts, takes notes off, answers by script)

The arm `none` goes to the relay at once. Each episode is a conversation by the proxy's header, and a header of ours
tells the relay which episode it is.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from evals.solve_rate.arms import Arm
from evals.solve_rate.config import Limits
from evals.solve_rate.environment import Environment
from leyline_agent.proxy.serve import listen, make_server
from leyline_agent.proxy.settings import ProxySettings

EPISODE_HEADER = "x-leyline-eval-episode"
_CONVERSATION_HEADER = "x-leyline-conversation"
_FRAMING = ("connection", "content-encoding", "content-length", "transfer-encoding", "host", "keep-alive")
_GRACE_S = 600.0
"""Beyond an episode's time: a model call that had begun, and a tool."""


class GymFailedError(Exception):
    """debug-gym's agent has failed, through no fault of the model."""


class GymAgents:
    """The proxies of a run's arms and the relay behind them, for as long as the context lasts."""

    def __init__(self, url: str, arms: Sequence[Arm], api_key: str, is_stopped: Callable[[], bool]) -> None:
        self._url, self._arms, self._api_key, self._is_stopped = url, arms, api_key, is_stopped
        self._episodes: dict[str, httpx.Client] = {}
        self._endpoints: dict[str, str] = {}
        self._stack = ExitStack()

    def __enter__(self) -> GymAgents:
        # Where the relay takes the notes off there are no outcomes, and that is no news.
        logger = logging.getLogger("leyline_agent.proxy")
        self._stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        relay = _Relay(self._url, self._episodes, self._is_stopped)
        thread = threading.Thread(target=relay.serve_forever, daemon=True)
        thread.start()
        self._stack.callback(_end_relay, relay, thread)
        behind = f"http://127.0.0.1:{relay.server_address[1]}"
        for arm in self._arms:
            self._endpoints[arm.name] = behind if arm.policy is None else self._start_proxy(arm, behind)
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def play(
        self,
        environment: Environment,
        arm: Arm,
        http: httpx.Client,
        episode: str,
        *,
        model: str,
        settings: dict[str, Any],
        limits: Limits,
    ) -> dict[str, Any]:
        """Have debug-gym's agent act through `http`; return its messages, what ended it, and an error or None.

        Raises:
            EnvironmentFailedError: its process has ended.
        """
        from evals.solve_rate.debug_gym_tasks import SYSTEM, DebugGymEnvironment

        assert isinstance(environment, DebugGymEnvironment)
        self._episodes[episode] = http
        try:
            return environment.act(
                limits.episode_s + _GRACE_S,
                system=SYSTEM,
                endpoint=f"{self._endpoints[arm.name]}/v1",
                api_key=self._api_key,
                model=model,
                headers={EPISODE_HEADER: episode, _CONVERSATION_HEADER: episode},
                settings=settings,
                max_turns=limits.max_turns,
                episode_s=limits.episode_s,
            )
        finally:
            del self._episodes[episode]

    def _start_proxy(self, arm: Arm, upstream: str) -> str:
        assert arm.policy is not None
        settings = ProxySettings(
            upstream=upstream,
            policy=arm.policy,
            policy_name=arm.policy_name,
            key=secrets.token_bytes(32),
            port=0,
            # As in the other agents: what an arm is called is what it does.
            gate="off",
        )
        server, listening = make_server(settings), listen(settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()

        def end() -> None:
            server.should_exit = True
            thread.join(20)
            listening.close()

        self._stack.callback(end)
        host, port = listening.getsockname()[:2]
        return f"http://{host}:{port}"


class _Relay(ThreadingHTTPServer):
    """Sends what it gets on through the episode's own client."""

    daemon_threads = True

    def __init__(self, url: str, episodes: dict[str, httpx.Client], is_stopped: Callable[[], bool]) -> None:
        super().__init__(("127.0.0.1", 0), _RelayHandler)
        self.url, self.episodes, self.is_stopped = url, episodes, is_stopped


class _RelayHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Relay

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        http = self.server.episodes.get(self.headers.get(EPISODE_HEADER, ""))
        ours = (*_FRAMING, EPISODE_HEADER, _CONVERSATION_HEADER)
        headers = [(name, value) for name, value in self.headers.items() if name.lower() not in ours]
        if http is None or self.server.is_stopped():
            self._answer(503, [], b'{"error": {"message": "the episode is over"}}')
            return
        try:
            response = http.post(f"{self.server.url}{self.path}", content=body, headers=headers)
        except httpx.HTTPError as error:
            self._answer(502, [], f'{{"error": {{"message": "no answer: {type(error).__name__}"}}}}'.encode())
            return
        kept = [item for item in response.headers.multi_items() if item[0].lower() not in _FRAMING]
        self._answer(response.status_code, kept, response.content)

    def _answer(self, status: int, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers or [("content-type", "application/json")]:
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def _end_relay(relay: _Relay, thread: threading.Thread) -> None:
    relay.shutdown()
    thread.join(20)
    relay.server_close()
