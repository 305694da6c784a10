"""Every fenced block of the README and the docs is run, or at least checked, as what its info string says it is.

| info string | what is done with it |
|---|---|
| `python` | run; the blocks of a page in order, in one namespace, in a folder of their own. What a page takes as |
|          | given is in `_GIVEN`. A page that names a server's address runs with a real one (marker `sglang`). |
| `yaml` | loaded as a policy, or as the part of one that it is; with a `suite`, as the config of a run |
| `json` | parsed |
| `sh` | `bash -n`; each command of ours through its parser; other programs must be known, see `_PROGRAMS` |
| `console` | the same with the lines after `$ `; the rest is output |
| `text` | nothing: a diagram, or output |

A comment on the line above a block says more:

    <!-- file: my_policy.yaml -->       also written to that file in the page's folder, before its Python runs
    <!-- not run: it needs a GPU -->    for what cannot be checked; shows as a skip with this reason
"""

from __future__ import annotations

import ast
import json
import os
import re
import secrets
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from evals.serving import RunningServer, free_port
from evals.solve_rate.cli import make_parser as make_eval_parser
from evals.solve_rate.config import parse_config
from leyline_agent.cli.command import make_parser
from leyline_agent.policy import parse_policy

_ROOT = Path(__file__).resolve().parents[1]
_PAGES = [
    *(_ROOT / page for page in ("README.md", "CONTRIBUTING.md", "evals/README.md")),
    *sorted((_ROOT / "docs").rglob("*.md")),
]
_FENCE = re.compile(
    r"^(?:<!-- *(?P<word>file|not run): *(?P<value>.+?) *-->\n+)?"
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_KINDS = ("python", "yaml", "json", "sh", "console", "text")

_SERVER, _PROXY = "http://127.0.0.1:30000", "http://127.0.0.1:8100"
"""What the pages call a server and a proxy."""

_PROGRAMS = {
    "cd",
    "cp",
    "curl",
    "docker",
    "echo",
    "export",
    "git",
    "ls",
    "mkdir",
    "openssl",
    "pip",
    "python3.11",
    "sglang",
    "sleep",
    "source",
}
"""Programs of others that a page may call; what they are given is not checked."""

_CHAT = """
messages = [{"role": "user", "content": "Read a.py."}]
tools = [{"type": "function", "function": {
    "name": "read", "description": "Reads a file.", "parameters": {"type": "object", "properties": {}}}}]
"""
_DETECTOR = "leyline_agent.policy.detectors:stale_tool_calls"
_GIVEN = {
    "README.md": "tools = []",
    "docs/client.md": _CHAT,
    "docs/langgraph.md": _CHAT,
    "docs/policies.md": (
        f"{_CHAT}\nchat_dicts, tool_schemas = messages, tools\n"
        "from leyline_agent.core.messages import messages_from_openai\n"
        "messages = messages_from_openai(chat_dicts)\n"
        "class tokenizer: encode = str.split"
    ),
}
"""Python that a page's reader has written before, by page; "" for a page without an entry."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    """Of the fence."""
    info: str
    text: str
    word: str | None
    """`file` or `not run`."""
    value: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def _blocks() -> list[Block]:
    found = []
    for path in _PAGES:
        page, text = path.relative_to(_ROOT).as_posix(), path.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start("info")) + 1
            block = textwrap.dedent(match["text"])
            found.append(Block(page, line, match["info"].strip(), block, match["word"], match["value"] or ""))
        assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * sum(b.page == page for b in found), page
    return found


_BLOCKS = _blocks()


def _of(*infos: str) -> list[Any]:
    """Return the blocks of a kind as parameters; those that are not run are skipped with their reason."""
    return [
        pytest.param(
            block, id=block.place, marks=[pytest.mark.skip(reason=block.value)] if block.word == "not run" else []
        )
        for block in _BLOCKS
        if block.info in infos
    ]


@pytest.mark.parametrize("block", [pytest.param(block, id=block.place) for block in _BLOCKS])
def test_a_block_says_what_it_is(block: Block) -> None:
    assert block.info in _KINDS, (
        f"{block.place}: got a block that begins with '```{block.info}', expected one of {', '.join(_KINDS)}; "
        "see the head of tests/test_snippets.py for what each is checked for, and for how to say that one is not"
    )
    commands = re.compile(r"\$ |leyline(-eval)? [a-z]+ |(python3?|pip|make|curl) ")
    if block.info == "text" and block.word != "not run":
        found = [line for line in block.text.splitlines() if commands.match(line)]
        assert not found, f"{block.place}: {found[0]!r} looks like a command: call the block 'sh' or 'console'"


@pytest.mark.parametrize("block", _of("yaml"))
def test_yaml_is_a_policy_or_a_config(block: Block) -> None:
    text = block.text
    if "suite:" in text:
        parse_config(yaml.safe_load(text), where=block.place)
        return
    if all(line.startswith("#") for line in text.splitlines() if line):
        return
    if text.startswith("select:"):
        texts = [f"rules:\n  - name: r\n    {line}\n    drop: true\n" for line in text.splitlines()]
    else:
        texts = [text if "rules:" in text else f"{text}rules: []\n"]
    for each in texts:
        # Where the page has a function of the reader's own, one that comes along stands in.
        checked = re.sub(r"(?<=python: \")[\w.]+:\w+", _DETECTOR, each)
        parse_policy(checked if "version:" in each else f"version: 1\n{checked}", allow_python=[_DETECTOR])


@pytest.mark.parametrize("block", _of("json"))
def test_json_is_json(block: Block) -> None:
    json.loads(block.text)


@pytest.mark.parametrize("block", _of("sh", "console"))
def test_a_command_is_one(block: Block) -> None:
    commands = block.text
    if block.info == "console":
        commands = "\n".join(line[2:] for line in block.text.splitlines() if line.startswith("$ "))
        assert commands, f"{block.place}: no line begins with '$ '; call it 'text' if it is output alone"
    checked = subprocess.run(["bash", "-n"], input=commands, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, f"{block.place}: {checked.stderr}"
    for words in _simple_commands(commands):
        _check_command(words, block.place)


def _simple_commands(script: str) -> Iterator[list[str]]:
    """Yield the words of each command, without what is set before it and where its output goes."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        words: list[str] = []
        is_target = False
        for token in [*lexer, ";"]:
            if set(token) <= set("();|&"):
                if words:
                    yield words
                words, is_target = [], False
            elif set(token) <= set("<>"):
                is_target = True
            elif is_target:
                is_target = False
            elif words or not re.match(r"\w+=", token):
                words.append(token)


def _check_command(words: list[str], place: str) -> None:
    program, *arguments = words
    program = program.removeprefix(".venv/bin/")
    if program in ("leyline", "leyline-eval"):
        try:
            {"leyline": make_parser, "leyline-eval": make_eval_parser}[program]().parse_args(arguments)
        except SystemExit as error:
            if error.code:
                pytest.fail(f"{place}: `{shlex.join(words)}` is refused; see the captured stderr")
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (_ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        asked = [word for word in arguments if "=" not in word]
        assert set(asked) <= set(targets), f"{place}: the Makefile has no target {set(asked) - set(targets)}"
    elif program == "python" and arguments[:1] == ["-m"]:
        assert find_spec(arguments[1]) is not None, f"{place}: there is no module {arguments[1]}"
    else:
        known = program in _PROGRAMS or program == "python"
        assert known, f"{place}: {program!r} is not known; add it to _PROGRAMS of tests/test_snippets.py if it is meant"


def _python_pages() -> list[Any]:
    pages: dict[str, list[Block]] = {}
    for block in _BLOCKS:
        if block.info == "python" and block.word != "not run":
            pages.setdefault(block.page, []).append(block)
    return [
        pytest.param(page, id=page, marks=[pytest.mark.sglang] if any(_needs_server(block) for block in blocks) else [])
        for page, blocks in pages.items()
    ]


def _needs_server(block: Block) -> bool:
    return _SERVER in block.text or _PROXY in block.text


@pytest.mark.parametrize("block", _of("python"))
def test_python_compiles(block: Block) -> None:
    compile("\n" * block.line + block.text, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("page", _python_pages())
def test_the_python_of_a_page_runs(page: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    blocks = [block for block in _BLOCKS if block.page == page and block.word != "not run"]
    python = [block for block in blocks if block.info == "python"]
    addresses: dict[str, str] = {}
    if any(_needs_server(block) for block in python):
        addresses[_SERVER] = request.getfixturevalue("cpu_server").url
    if any(_PROXY in block.text for block in python):
        addresses[_PROXY] = request.getfixturevalue("proxy_url")
    for block in blocks:
        if block.word == "file":
            (tmp_path / block.value).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.value).write_text(_addressed(block.text, addresses), encoding="utf-8")
    pieces = [(_GIVEN.get(page, ""), "_GIVEN", 0)]
    pieces += [(_addressed(block.text, addresses), page, block.line) for block in python]
    # In a process of its own: a snippet closes nothing, imports what it likes and may change anything.
    run = subprocess.run(
        [sys.executable, "-c", _RUN_PIECES],
        input=json.dumps(pieces),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    hint = ""
    if "NameError" in run.stderr:
        hint = (
            "define it in a block above it on the page, or in _GIVEN of tests/test_snippets.py if the reader has it "
            "already"
        )
    assert run.returncode == 0, f"{run.stderr[-4000:]}\n{hint}"


def _addressed(text: str, addresses: dict[str, str]) -> str:
    for written, real in addresses.items():
        text = text.replace(written, real)
    return text


_RUN_PIECES = """
import ast, asyncio, inspect, json, sys
import httpx

build = httpx.Request.__init__
def shorter(self, method, url, *args, **options):
    body = options.get("json")
    if str(url).endswith("/chat/completions") and not {"max_tokens", "max_completion_tokens"} & body.keys():
        options["json"] = {**body, "max_tokens": 8}  # a random model does not end by itself
    build(self, method, url, *args, **options)
httpx.Request.__init__ = shorter

sys.path.insert(0, ".")
names = {"__name__": "snippet"}
for text, page, line in json.load(sys.stdin):
    # The lines of the page, so that a traceback names the right one.
    code = compile("\\n" * line + text, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, names)
    if inspect.iscoroutine(result):
        asyncio.run(result)
"""


@pytest.fixture(scope="module")
def proxy_url(cpu_server: RunningServer) -> Iterator[str]:
    """Address of a proxy before the live server, started as the pages say."""
    port = free_port()
    arguments = ["proxy", "--policy", "keep_last_tool_outputs", "--upstream", cpu_server.url, "--port", str(port)]
    environment = os.environ | {"LEYLINE_PROXY_KEY": secrets.token_urlsafe(24)}
    process = subprocess.Popen([sys.executable, "-m", "leyline_agent.cli", *arguments], env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until(lambda: _answers(url), process)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def _answers(url: str) -> bool:
    try:
        httpx.get(url, timeout=1)
    except httpx.TransportError:
        return False
    return True


def _wait_until(is_so: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert process.poll() is None, "the proxy has ended"
        assert time.monotonic() < deadline, "the proxy does not answer"
        time.sleep(0.1)
