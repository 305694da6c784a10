"""Real clients through the proxy to a real SGLang on the CPU, patched and unpatched.

The model is random, so the tests bring the agent's tool calls themselves: each turn adds a question, a call and its
output, and the model's answer is whatever it says.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver

from evals.serving import SERVED_MODEL_NAME, RunningServer, free_port, serve
from leyline_agent import Policy, load_policy
from leyline_agent.proxy.upstream import Upstream
from tests.proxy.debug_gym import run_debug_gym
from tests.proxy.scripted import CHAT, running_proxy, stats_of

pytestmark = pytest.mark.sglang

ROOT = Path(__file__).parents[2]
NODE_CLIENT = Path(__file__).parent / "openai_node"

NUM_TURNS = 5
# A question takes two turns here, the call that it brings and the model's answer: the last two outputs stay.
POLICY = load_policy("keep_last_tool_outputs").with_turns(4)
# So the first two questions have nothing to evict, and from then on each evicts one output.
NUM_SPLICES = NUM_TURNS - 2
TOOLS: Any = [{"type": "function", "function": {"name": "cat", "parameters": {"type": "object", "properties": {}}}}]
SETTINGS: dict[str, Any] = {"model": SERVED_MODEL_NAME, "temperature": 0, "max_tokens": 6}


def turn_of(idx: int, salt: str) -> list[dict[str, Any]]:
    """A question, a call and its output; long enough that its eviction shows in the counts."""
    call = {"id": f"c{idx}", "type": "function", "function": {"name": "cat", "arguments": f'{{"path": "{idx}.py"}}'}}
    output = "\n".join(f"{salt} line {line} of file {idx}: value = {line * idx % 97}" for line in range(40))
    return [
        {"role": "user", "content": f"Look at file {idx}. {salt}"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{idx}", "content": output},
    ]


@pytest.fixture
def start_proxy() -> Iterator[Callable[..., str]]:
    """Starts a proxy before a server; returns its address."""
    with ExitStack() as stack:

        def start(server: RunningServer, policy: Policy = POLICY, **options: Any) -> str:
            return stack.enter_context(running_proxy(server.url, policy, **options))

        yield start


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Bodies of the chat requests, as they leave the proxy."""
    bodies: list[dict[str, Any]] = []
    send = Upstream.send

    def recording(self: Upstream, method: str, path: str, headers: Any, body: bytes) -> Any:
        if path == CHAT:
            bodies.append(json.loads(body))
        return send(self, method, path, headers, body)

    monkeypatch.setattr(Upstream, "send", recording)
    return bodies


@pytest.fixture
def openai_client() -> Iterator[Callable[..., openai.OpenAI]]:
    with ExitStack() as stack:

        def make(proxy: str, key: str = "python", **options: Any) -> openai.OpenAI:
            http = httpx.Client(trust_env=False, timeout=120)
            client = openai.OpenAI(base_url=proxy + "/v1", api_key=key, max_retries=0, http_client=http, **options)
            return stack.enter_context(client)

        yield make


def run_agent(
    client: openai.OpenAI, salt: str, *, stream: bool, num_turns: int = NUM_TURNS, messages: Any = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Take the turns of one agent; return its messages and the outcomes."""
    messages = [] if messages is None else messages
    outcomes = []
    first = sum(message["role"] == "tool" for message in messages)
    for idx in range(first, first + num_turns):
        messages += turn_of(idx, salt)
        asked: Any = {**SETTINGS, "messages": messages, "tools": TOOLS}
        if stream:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        raw = client.chat.completions.with_raw_response.create(**asked)
        outcomes.append(json.loads(raw.headers.get("x-leyline", "null")))
        if stream:
            chunks = list(raw.parse())
            said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
            assert chunks[-1].usage is not None
        else:
            said = raw.parse().choices[0].message.content or ""
        messages.append({"role": "assistant", "content": said})
    return messages, outcomes


def plain_answer(server: RunningServer, body: dict[str, Any]) -> str:
    """What a server answers to the very same messages, without a note and with nothing cached."""
    assert httpx.post(server.url + "/flush_cache", timeout=60).is_success
    plain = {name: value for name, value in body.items() if name not in ("custom_params", "stream", "stream_options")}
    answer = httpx.post(server.url + CHAT, json=plain, timeout=120).raise_for_status().json()
    return answer["choices"][0]["message"]["content"] or ""


def assert_spliced(stats: dict[str, Any], turns: int = NUM_TURNS, splices: int = NUM_SPLICES) -> None:
    """The one conversation was spliced in each turn that evicted something, and most of its prompts were cached."""
    (one,) = stats["conversations"]
    assert (one["turns"], one["splices"], one["fallbacks"]) == (turns, splices, {})
    assert one["moved_tokens"] > 1000
    assert one["hit_rate"] > 0.5
    assert stats["notes"] == "answered"


@pytest.mark.parametrize("by", ["prefix", "header"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_openai_for_python(
    by: str,
    stream: bool,
    cpu_server: RunningServer,
    unpatched_server: RunningServer,
    start_proxy: Any,
    openai_client: Any,
    sent: list[dict[str, Any]],
) -> None:
    for server in (cpu_server, unpatched_server):
        assert httpx.post(server.url + "/flush_cache", timeout=60).is_success
    proxy = start_proxy(cpu_server)
    headers = {"x-leyline-conversation": "thread 1"} if by == "header" else None
    client = openai_client(proxy, default_headers=headers)

    messages, outcomes = run_agent(client, f"python {by} {stream}", stream=stream)

    assert [outcome["status"] for outcome in outcomes][-NUM_SPLICES:] == ["spliced"] * NUM_SPLICES
    assert sum("[evicted: cat" in str(message["content"]) for message in sent[-1]["messages"]) == NUM_SPLICES
    assert len(sent) == NUM_TURNS
    stats = stats_of(proxy)
    assert_spliced(stats)
    assert stats["conversations"][0]["by"] == by
    assert not [message for message in messages if "[evicted" in str(message["content"])]
    assert SERVED_MODEL_NAME in [model.id for model in client.models.list()]
    # The same requests without splices: what stands right of an edit is computed again.
    plain = start_proxy(unpatched_server)
    run_agent(openai_client(plain, default_headers=headers), f"python {by} {stream}", stream=stream)
    spliced, prefilled = (totals["totals"] for totals in (stats, stats_of(plain)))
    assert spliced["prompt_tokens"] == pytest.approx(prefilled["prompt_tokens"], rel=0.02)
    assert spliced["cached_tokens"] > 1.3 * prefilled["cached_tokens"]
    assert spliced["recomputed_tokens"] < 0.8 * prefilled["recomputed_tokens"]


async def test_openai_for_python_async(cpu_server: RunningServer, start_proxy: Any) -> None:
    """Two agents at once, whose conversations stay apart."""
    proxy = start_proxy(cpu_server)

    async def run(client: openai.AsyncOpenAI, salt: str) -> None:
        messages: list[Any] = []
        for idx in range(NUM_TURNS):
            messages += turn_of(idx, salt)
            said = ""
            async for chunk in await client.chat.completions.create(**SETTINGS, messages=messages, stream=True):
                said += "".join(choice.delta.content or "" for choice in chunk.choices)
            messages.append({"role": "assistant", "content": said})

    http = httpx.AsyncClient(trust_env=False, timeout=120)
    async with openai.AsyncOpenAI(base_url=proxy + "/v1", api_key="k", max_retries=0, http_client=http) as client:
        await asyncio.gather(run(client, "async one"), run(client, "async two"))

    stats = stats_of(proxy)
    assert [(one["turns"], one["splices"]) for one in stats["conversations"]] == [(NUM_TURNS, NUM_SPLICES)] * 2


@pytest.fixture(scope="session")
def node_folder() -> Path:
    """A folder with OpenAI's client for Node, installed once into the build folder."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not on this machine")
    folder = ROOT / "build" / "openai-node"
    wanted = (NODE_CLIENT / "package.json").read_text()
    folder.mkdir(parents=True, exist_ok=True)
    installed = folder / ".installed"
    if not installed.exists() or installed.read_text() != wanted:
        (folder / "package.json").write_text(wanted)
        options = ["--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts"]
        done = subprocess.run(["npm", "install", *options], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"npm cannot install the client: {done.stderr[-300:]}")
        installed.write_text(wanted)
    (folder / "client.mjs").write_text((NODE_CLIENT / "client.mjs").read_text())
    return folder


def test_openai_for_node(cpu_server: RunningServer, start_proxy: Any, node_folder: Path) -> None:
    proxy = start_proxy(cpu_server)
    turns = json.dumps([turn_of(idx, "node") for idx in range(NUM_TURNS)])
    command = ["node", "client.mjs", proxy + "/v1", SERVED_MODEL_NAME]
    done = subprocess.run(
        command, cwd=node_folder, input=turns, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr

    *answers, last = map(json.loads, done.stdout.splitlines())
    assert [answer["outcome"]["status"] for answer in answers][-NUM_SPLICES:] == ["spliced"] * NUM_SPLICES
    assert all(answer["usage"]["prompt_tokens"] > 0 for answer in answers)
    assert last["models"] == [SERVED_MODEL_NAME]
    # Streamed answers count no tokens of their own unless the client asks for it, which this one does.
    assert_spliced(stats_of(proxy))


@tool
def cat(path: str) -> str:
    """Print a file."""
    return path


@pytest.mark.parametrize("mode", ["invoke", "stream"])
def test_a_langchain_agent(mode: str, cpu_server: RunningServer, start_proxy: Any) -> None:
    proxy = start_proxy(cpu_server)
    http = httpx.Client(trust_env=False, timeout=120)
    model = ChatOpenAI(
        **{**SETTINGS, "base_url": proxy + "/v1", "api_key": "langchain", "http_client": http}, stream_usage=True
    )
    agent: Any = create_agent(model, [cat], checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    with http:
        for idx in range(NUM_TURNS):
            question, call, output = turn_of(idx, f"langchain {mode}")
            calls = [{"name": "cat", "args": {"path": f"{idx}.py"}, "id": call["tool_calls"][0]["id"]}]
            added = [
                HumanMessage(question["content"]),
                AIMessage("", tool_calls=calls),
                ToolMessage(output["content"], tool_call_id=output["tool_call_id"]),
            ]
            if mode == "invoke":
                agent.invoke({"messages": added}, config)
            else:
                assert list(agent.stream({"messages": added}, config, stream_mode="messages"))

    assert_spliced(stats_of(proxy))


@pytest.mark.parametrize("name", ["-", "episode 1"], ids=["prefix", "header"])
def test_debug_gym(name: str, cpu_server: RunningServer, start_proxy: Any, tmp_path: Path) -> None:
    proxy = start_proxy(cpu_server)
    answers = run_debug_gym(
        proxy, SERVED_MODEL_NAME, name, tmp_path, [turn_of(idx, f"gym {name}") for idx in range(NUM_TURNS)]
    )

    assert len(answers) == NUM_TURNS
    assert_spliced(stats_of(proxy))


def test_a_fork_and_another_api_key_have_rows_of_their_own(
    cpu_server: RunningServer, start_proxy: Any, openai_client: Any
) -> None:
    proxy = start_proxy(cpu_server)
    client = openai_client(proxy)
    messages, _ = run_agent(client, "forks", stream=False, num_turns=NUM_TURNS - 1)
    branch = list(messages)
    _, this_way = run_agent(client, "forks this way", stream=False, num_turns=1, messages=messages)
    _, that_way = run_agent(client, "forks that way", stream=False, num_turns=1, messages=branch)
    run_agent(openai_client(proxy, "another key"), "forks", stream=False)

    assert this_way[0]["status"] == "spliced"
    # A conversation of its own, to which the server has nothing that was spliced.
    assert that_way[0]["status"] == "unchanged"
    stats = stats_of(proxy)
    assert sorted(one["turns"] for one in stats["conversations"]) == [1, NUM_TURNS, NUM_TURNS]
    assert len({one["conversation"] for one in stats["conversations"]}) == 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_unpatched_server_answers_as_it_does_to_a_plain_client(
    stream: bool,
    unpatched_server: RunningServer,
    start_proxy: Any,
    openai_client: Any,
    sent: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    proxy = start_proxy(unpatched_server)
    messages, outcomes = run_agent(openai_client(proxy), f"unpatched {stream}", stream=stream)

    assert outcomes == [None] * NUM_TURNS
    assert stats_of(proxy)["notes"] == "ignored"
    assert len([record for record in caplog.records if "no Leyline plugin" in record.message]) == 1
    answers = [message["content"] for message in messages if message["role"] == "assistant" and message["content"]]
    assert [plain_answer(unpatched_server, body) for body in sent] == answers


def test_without_edits_prompts_answers_and_requests_are_those_without_the_proxy(
    cpu_server: RunningServer, start_proxy: Any, openai_client: Any
) -> None:
    """Byte for byte; the ids and counts are the server's own."""
    proxy = start_proxy(cpu_server, load_policy("none"))
    seen = []
    for url in (cpu_server.url, proxy):
        assert httpx.post(cpu_server.url + "/flush_cache", timeout=60).is_success
        requests: list[httpx.Request] = []
        http = httpx.Client(trust_env=False, timeout=120, event_hooks={"request": [requests.append]})
        with openai.OpenAI(base_url=url + "/v1", api_key="k", max_retries=0, http_client=http) as client:
            messages: list[Any] = []
            answers = []
            for idx in range(3):
                messages += turn_of(idx, "without edits")
                more = {"return_prompt_token_ids": True}
                answer = client.chat.completions.create(**SETTINGS, messages=messages, tools=TOOLS, extra_body=more)
                choice = answer.choices[0]
                usage = answer.usage
                assert usage is not None
                cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
                answers.append((choice.message.content, choice.model_extra["prompt_token_ids"], cached))  # type: ignore[index]
                messages.append({"role": "assistant", "content": choice.message.content})
        seen.append((answers, [request.content for request in requests]))

    assert seen[0] == seen[1]
    assert len(seen[0][0][0][1]) > 300


def test_the_agent_goes_on_when_the_server_was_killed_and_started_again(
    model_dir: Path,
    unpatched_server: RunningServer,
    start_proxy: Any,
    openai_client: Any,
    sent: list[dict[str, Any]],
) -> None:
    port = free_port()
    with serve(model_dir, port=port, env={"LEYLINE_GATE": "0"}, fork=True) as server:
        proxy = start_proxy(server)
        client = openai_client(proxy)
        messages, before = run_agent(client, "killed", stream=True)
        assert before[-1]["status"] == "spliced"
        asked = [*messages, *turn_of(NUM_TURNS, "killed")]
        stream = client.chat.completions.create(
            **{**SETTINGS, "max_tokens": 2000}, messages=asked, tools=TOOLS, stream=True
        )
        next(iter(stream))
        os.killpg(server.pid, signal.SIGKILL)
        # An answer that broke off is none, and the client is told.
        with pytest.raises((openai.APIConnectionError, httpx.TransportError)):
            list(stream)
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(**SETTINGS, messages=asked, tools=TOOLS)
    assert (caught.value.status_code, caught.value.code) == (502, "upstream_unreachable")

    with serve(model_dir, port=port, env={"LEYLINE_GATE": "0"}, fork=True) as server:
        sent.clear()
        messages, first = run_agent(client, "killed", stream=False, num_turns=1, messages=messages)
        # Turns that evict nothing more: what a splice leaves is not what a plain server computes.
        after = list(first)
        for question in ("Is that all?",):
            messages.append({"role": "user", "content": question})
            raw = client.chat.completions.with_raw_response.create(**SETTINGS, messages=messages, tools=TOOLS)
            after.append(json.loads(raw.headers["x-leyline"]))
            messages.append({"role": "assistant", "content": raw.parse().choices[0].message.content or ""})
        # And then the agent splices again.
        _, last = run_agent(client, "killed", stream=False, num_turns=1, messages=list(messages))

    assert [(outcome["status"], outcome.get("reason")) for outcome in after] == [
        ("refused", "unknown_base"),
        ("unchanged", None),
    ]
    assert last[0]["status"] == "spliced"
    answers = [messages[-3]["content"], messages[-1]["content"]]
    assert [plain_answer(unpatched_server, body) for body in sent[:2]] == answers
    stats = stats_of(proxy)
    (one,) = stats["conversations"]
    assert one["fallbacks"] == {"unknown_base": 1}
    assert stats["failures"] == {"upstream_broke_off": 1, "upstream_unreachable": 1}
