"""What the proxy adds to a streamed answer's latency: the same requests with and without it, in one run.

    python -m evals.micro.proxy [--streams 1 200] [--rounds 2] [--events 150] [--gap-ms 50] [--messages 50]

Three processes: a scripted upstream that writes an event every `--gap-ms` with the time in it, the proxy as
`leyline proxy` starts it, and this one. `--streams` agents at a time take turns of a conversation of `--messages`
messages and two more each turn, `--rounds` directly and as many through the proxy, by turns. The first turn, in which
the proxy meets a whole history for the first time, is short and not timed; the two after it begin at random within one
answer's length, as those of independent agents would. Prints one JSON line for each number of streams: p50 and p95
in milliseconds, direct and through the proxy, of `first` (from the request to the first event), `event` (from its
writing to its arrival) and `whole` (from the request to the end of the answer), and `added_p50_ms`. Exits 1 where an
answer is not the one that was sent, or where more than `--bar-ms` was added to `first` or `event` at p50; `whole` is
seconds of the upstream's own sleep, of which a busy machine makes more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from evals.micro.policy import agent_history
from evals.micro.result_rows import about, percentile
from evals.serving import free_port

_HOST = "127.0.0.1"
_TIME = re.compile(rb'"t":(\d+),"to":"([^"]*)"')
_MAX_EVENT_BYTES = 400
_KINDS = ("first", "event", "whole")

_Times = dict[str, list[float]]


class _Stream(asyncio.Protocol):
    """One connection: sends requests, and notes when each event of the answer was written and when it came."""

    def __init__(self) -> None:
        self.events: list[tuple[int, int, bytes]] = []
        self._tail = b""
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        """Keep the transport."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Read what came."""
        now = time.monotonic_ns()
        text = self._tail + data
        end = 0
        for match in _TIME.finditer(text):
            self.events.append((int(match[1]), now, match[2]))
            end = match.end()
        self._tail = text[max(end, len(text) - _MAX_EVENT_BYTES) :]
        if text.endswith(b"\r\n0\r\n\r\n") and not self.ended.done():
            self.ended.set_result(now)

    def connection_lost(self, error: Exception | None) -> None:
        """Fail where no whole answer came."""
        if not self.ended.done():
            self.ended.set_exception(error or ConnectionError("the answer broke off"))

    async def ask(self, head: bytes, body: bytes) -> tuple[int, int, list[tuple[int, int, bytes]]]:
        """Return when the request left, when its answer ended, and the events."""
        self.ended = asyncio.get_running_loop().create_future()
        self.events, self._tail = [], b""
        sent = time.monotonic_ns()
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        return sent, await self.ended, self.events


async def _agent(
    port: int, name: str, bodies: Sequence[bytes], delay_s: float, args: argparse.Namespace, times: _Times
) -> None:
    _, stream = await asyncio.get_running_loop().create_connection(_Stream, _HOST, port)
    for turn, body in enumerate(bodies):
        num_events = args.events if turn else 1
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {_HOST}\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer k\r\nx-leyline-conversation: {name}\r\nx-to: {name}\r\nx-events: {num_events}\r\n"
        )
        if turn < 2:
            # All have had their first turn before any has its second.
            await asyncio.sleep(delay_s if turn == 0 else _length_s(args))
        sent, ended, events = await stream.ask(head.encode(), body)
        if len(events) != num_events or {to for _, _, to in events} != {name.encode()}:
            raise AssertionError(f"{name}: got {len(events)} events, expected {num_events} of its own")
        if turn:
            times["first"].append((events[0][1] - sent) / 1e6)
            times["whole"].append((ended - sent) / 1e6)
            times["event"] += [(came - written) / 1e6 for written, came, _ in events]
    stream.transport.close()


def _length_s(args: argparse.Namespace) -> float:
    return float(args.events * args.gap_ms / 1e3)


def _bodies(num_messages: int, num_turns: int, seed: int) -> list[bytes]:
    """Return the requests of one agent; what it sends back is what the upstream answers."""
    history = [message.to_openai() for message in agent_history(num_messages + 2 * num_turns, seed)]
    return [
        json.dumps({"model": "m", "stream": True, "messages": history[: num_messages + 2 * turn]}).encode()
        for turn in range(num_turns)
    ]


async def _measure(ports: dict[str, int], num_streams: int, args: argparse.Namespace) -> dict[str, _Times]:
    times: dict[str, _Times] = {arm: defaultdict(list) for arm in ports}
    bodies = [_bodies(args.messages, 3, seed) for seed in range(num_streams)]
    rng = random.Random(0)
    delays = [rng.random() * _length_s(args) if num_streams > 1 else 0 for _ in range(num_streams)]
    for round_idx in range(args.rounds + 1):
        for arm, port in ports.items():
            # The first round warms up.
            into = times[arm] if round_idx else defaultdict(list)
            agents = [
                _agent(port, f"{arm}-{num_streams}-{round_idx}-{idx}", bodies[idx], delay, args, into)
                for idx, delay in enumerate(delays)
            ]
            await asyncio.gather(*agents)
            print(f"proxy: {num_streams} streams, round {round_idx}/{args.rounds}, {arm}", file=sys.stderr)
    return times


async def _serve_upstream(port: int, gap_s: float) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
                await reader.readexactly(int(fields["content-length"]))
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
                    b'x-leyline: {"status":"unchanged"}\r\n\r\n'
                )
                num_events = int(fields["x-events"])
                for idx in range(num_events):
                    if idx:
                        await asyncio.sleep(gap_s)
                    choice = {"index": 0, "delta": {"content": "a word "}, "finish_reason": None}
                    if idx == num_events - 1:
                        choice["finish_reason"] = "stop"
                    frame = json.dumps({"id": "x", "object": "chat.completion.chunk", "choices": [choice]})
                    stamp = f'"t":{time.monotonic_ns()},"to":"{fields["x-to"]}"'
                    _write_chunk(writer, f"data: {frame[:-1]},{stamp}}}\n\n".encode())
                _write_chunk(writer, b"data: [DONE]\n\n")
                writer.write(b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, _HOST, port, backlog=1024)
    print("ready", flush=True)
    await server.serve_forever()


def _write_chunk(writer: asyncio.StreamWriter, payload: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(payload), payload))


@contextmanager
def _process(*command: str) -> Iterator[None]:
    """Run one of our own modules until the context ends, from when it has said something on."""
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"{command[0]} did not start")
        yield
    finally:
        process.terminate()
        process.wait()
        process.stdout and process.stdout.close()


def _row(num_streams: int, times: dict[str, _Times], args: argparse.Namespace) -> dict[str, Any]:
    cuts = {
        arm: {
            f"{kind}_{name}_ms": round(percentile(of_arm[kind], percent), 3)
            for kind in _KINDS
            for name, percent in (("p50", 50), ("p95", 95))
        }
        for arm, of_arm in times.items()
    }
    added = {kind: round(cuts["proxy"][f"{kind}_p50_ms"] - cuts["direct"][f"{kind}_p50_ms"], 3) for kind in _KINDS}
    shape = {"streams": num_streams, "events": args.events, "gap_ms": args.gap_ms, "messages": args.messages}
    return {"op": "proxy", **shape, "answers": len(times["proxy"]["first"]), **cuts, "added_p50_ms": added}


def _run(coroutine: Any) -> Any:
    import uvloop

    return uvloop.run(coroutine)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each number of streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 200])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--events", type=int, default=150, help="of one answer")
    parser.add_argument("--gap-ms", type=float, default=50.0)
    parser.add_argument("--messages", type=int, default=50)
    parser.add_argument("--policy", default="keep_last_tool_outputs")
    parser.add_argument("--bar-ms", type=float, default=5.0)
    parser.add_argument("--git", help="the commit that was measured, by default that of the working tree")
    parser.add_argument("--upstream-port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.upstream_port:
        _run(_serve_upstream(args.upstream_port, args.gap_ms / 1e3))
        return 0
    ports = {"direct": free_port(), "proxy": free_port()}
    upstream = f"http://{_HOST}:{ports['direct']}"
    scripted = ("--upstream-port", str(ports["direct"]), "--gap-ms", str(args.gap_ms))
    proxy = ("--policy", args.policy, "--upstream", upstream, "--port", str(ports["proxy"]))
    is_good = True
    with _process("evals.micro.proxy", *scripted), _process("leyline_agent.cli", "proxy", *proxy):
        for num_streams in args.streams:
            row = _row(num_streams, _run(_measure(ports, num_streams, args)), args)
            command = " ".join(["python -m evals.micro.proxy", *(sys.argv[1:] if argv is None else argv)])
            print(json.dumps({**row, **about(args.git, command)}), flush=True)
            added = row["added_p50_ms"]
            is_good &= max(added["first"], added["event"]) <= args.bar_ms
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
