"""From arguments to a command's exit code. Results go to stdout, complaints to stderr."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from leyline_agent.cli import offline, proxy, server
from leyline_agent.cli.common import API_KEY_VARIABLE, UnusableError
from leyline_agent.cli.completion import SHELLS, completion
from leyline_agent.errors import LeylineError, PolicyError, SpliceTransportError

_DESCRIPTION = "Check policies and preview what they do; ask a server what it can do and what it holds."
_EXIT_CODES = (
    "exit codes: 0 good; 1 not good: a policy is wrong or cannot be read, a server cannot splice or refuses; 2 wrong "
    "usage, another file that cannot be read or written, or a server that does not answer"
)
_POLICY = "a YAML file, or the name of a shipped policy (see `leyline policies`)"
_TRAJECTORY = "JSON: a list of chat messages, or {'messages': [...], 'tools': [...]}; the whole history, unedited"


Mark = Callable[[argparse.Action, str], None]
"""Is told of each argument that is a `policy` or a `file`, for a shell's completion."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = make_parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A recording may hold what a terminal's encoding has no form for, such as half of a surrogate pair.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code: int = args.run(args)
        # What is still buffered is written here, where a closed pipe is expected, not as the interpreter exits.
        sys.stdout.flush()
    except (LeylineError, UnusableError) as error:
        others = error.others if isinstance(error, PolicyError) else ()
        print(f"leyline: {error}", *others, sep="\n", file=sys.stderr)
        return 2 if isinstance(error, UnusableError | SpliceTransportError) else 1
    except BrokenPipeError:
        # `leyline plan … | head`: the reader has seen enough. Else Python complains again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def make_parser(mark: Mark = lambda action, kind: None) -> argparse.ArgumentParser:
    """Return the command line's parser."""
    top = argparse.ArgumentParser(prog="leyline", description=_DESCRIPTION, epilog=_EXIT_CODES)
    top.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(run: Callable[[argparse.Namespace], int], words: str) -> argparse.ArgumentParser:
        description = words[0].upper() + words[1:] + "."
        added = commands.add_parser(run.__name__, help=words, description=description, epilog=_EXIT_CODES)
        added.set_defaults(run=run)
        return added

    policies = command(offline.policies, "list the shipped policies, a line each")
    policies.add_argument("--json", action="store_true", help="also when to use each, what it costs and risks")

    validate = command(offline.validate, "check policies")
    _add_policy(validate, mark, "policies", nargs="+")
    _add_allow_python(validate)
    validate.add_argument("--json", action="store_true", help="print one JSON list instead of lines")

    explain = command(
        offline.explain, "say what a policy does, in English and to each request of a recorded conversation"
    )
    _add_policy(explain, mark, "policy")
    _add_trajectory(explain, mark, nargs="?")
    _add_counting(explain)
    explain.add_argument("--directives", action="store_true", help="list the directives of each turn")
    mark(explain.add_argument("--html", metavar="FILE", help="write a page that shows the edited conversation"), "file")
    explain.add_argument("--json", action="store_true", help="print JSON, with the edited messages of each turn")

    compare = command(offline.compare, "put what policies do to a conversation side by side")
    _add_policy(compare, mark, "policies", nargs="*")
    _add_trajectory(compare, mark)
    compare.add_argument("--all", action="store_true", help="compare all shipped policies")
    _add_counting(compare)
    compare.add_argument("--json", action="store_true", help="print one JSON object instead of a table")

    plan = command(offline.plan, "print the directives of one edited turn as JSON; needs --tokenizer or --server")
    _add_policy(plan, mark, "policy")
    _add_trajectory(plan, mark)
    plan.add_argument("--turn", type=int, metavar="N", help="the request for the n-th answer (default: the last)")
    _add_counting(plan)
    plan.add_argument("--json", action="store_true", help="what it does anyway")

    health = command(server.health, "ask a server whether it can splice, and if not, why")
    _add_server(health)
    health.add_argument("--json", action="store_true", help="print the server's answer as JSON")

    conversation = command(server.conversation, "show what a server has of a conversation")
    release = command(server.release, "free what a server has of a conversation")
    release.add_argument("--scrub", action="store_true", help="also zero every row that nothing refers to")
    for of_conversation in (conversation, release):
        # Anybody on the machine can read a command line, so the secrets are not on it.
        of_conversation.description = (
            f"{of_conversation.description} The conversation's id is read from {server.CONVERSATION_VARIABLE} or from "
            f"stdin, the cache_salt of its requests, if they have one, from {server.CACHE_SALT_VARIABLE}."
        )
        _add_server(of_conversation)
        of_conversation.add_argument("--extra-key", help="that of the conversation's requests, if they have one")
        of_conversation.add_argument("--json", action="store_true", help="print the server's answer as JSON")

    serve = command(proxy.proxy, "serve an OpenAI-compatible API before another server and edit what passes")
    mark(serve.add_argument("--policy", required=True, metavar="POLICY", help=_POLICY), "policy")
    serve.add_argument("--upstream", required=True, metavar="URL", help="the server, such as http://127.0.0.1:30000")
    serve.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1, this machine alone)")
    serve.add_argument("--port", type=int, default=8100, metavar="N", help="(default: 8100; 0: a free one)")
    key_file = serve.add_argument(
        "--key-file", metavar="FILE", help="the proxy's key, 16 random bytes or more; else LEYLINE_PROXY_KEY has it"
    )
    mark(key_file, "file")
    for option, default, words in (
        ("--max-conversations", 1024, "remembered; the last used ones stay"),
        ("--max-memory-mb", 512, "of the remembered conversations' last requests"),
        ("--max-body-mb", 64, "of one request"),
    ):
        serve.add_argument(option, type=int, default=default, metavar="N", help=f"{words} (default: {default})")
    serve.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds of silence of the upstream (default: 600)"
    )
    serve.add_argument(
        "--gate", choices=("auto", "off"), default="auto", help="off: splice also where prefilling again is quicker"
    )
    serve.add_argument(
        "--template-changes",
        choices=("amortize", "reprefill"),
        default="amortize",
        help="reprefill: prefill again where the template writes what was generated another way",
    )
    serve.add_argument("--scrub", action="store_true", help="zero free rows of the server with whatever is forgotten")
    _add_allow_python(serve)
    _add_context_window(serve)

    counts = command(proxy.stats, "ask a proxy what it kept, moved and recomputed")
    _add_server(counts, "where the proxy listens, such as http://127.0.0.1:8100", "the proxy's key for its stats")
    counts.add_argument("--all", action="store_true", help="list every conversation, not the 20 last used")
    counts.add_argument("--json", action="store_true", help="print the proxy's answer as JSON")

    shell = command(completion, "print a script by which a shell completes this command")
    shell.add_argument("shell", choices=SHELLS)
    return top


class _Version(argparse.Action):
    """Looks the version up only when it is asked for: to read the metadata of a package takes milliseconds."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"leyline {version('leyline-agent')}")
        parser.exit()


def _add_policy(command: argparse.ArgumentParser, mark: Mark, name: str, **options: Any) -> None:
    mark(command.add_argument(name, metavar="POLICY", help=_POLICY, **options), "policy")


def _add_trajectory(command: argparse.ArgumentParser, mark: Mark, **options: Any) -> None:
    mark(command.add_argument("trajectory", metavar="TRAJECTORY", help=_TRAJECTORY, **options), "file")


def _add_counting(command: argparse.ArgumentParser) -> None:
    _add_allow_python(command)
    _add_context_window(command)
    exact = command.add_mutually_exclusive_group()
    exact.add_argument("--tokenizer", metavar="PATH", help="count exactly, with the tokenizer in this model folder")
    exact.add_argument("--server", metavar="URL", help="count exactly, with this server's /tokenize")
    command.add_argument("--api-key", help=f"the server's key; better set {API_KEY_VARIABLE}")
    command.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds to wait (default: 30)")


def _add_context_window(command: argparse.ArgumentParser) -> None:
    command.add_argument("--context-window", type=_positive, metavar="N", help="tokens that the model can take")


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if not number:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number above 0")
    return number


def _add_allow_python(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--allow-python",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="a function that the policy may select by; it is imported and run",
    )


def _add_server(
    command: argparse.ArgumentParser,
    words: str = "where the server listens, such as http://127.0.0.1:30000",
    key: str = "the server's key",
) -> None:
    command.add_argument("url", metavar="URL", help=words)
    command.add_argument(
        "--api-key",
        default=None,
        help=f"{key}; better set {API_KEY_VARIABLE}, which `ps` does not show",
    )
    command.add_argument("--timeout", type=float, default=10.0, metavar="S", help="seconds to wait (default: 10)")
