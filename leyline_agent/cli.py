"""The command `leyline`: check and preview policies, ask a server what it can do and what it has of a conversation.

Results go to stdout, complaints to stderr. Exit codes: 0 good, 1 not good, 2 wrong usage or no answer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyline_agent.core.edits import Edit
from leyline_agent.core.messages import Message, messages_from_openai
from leyline_agent.errors import LeylineError, PolicyError, SpliceTransportError
from leyline_agent.policy import explain_policy, load_policy, policy_edits
from leyline_agent.policy.turns import num_chars

if TYPE_CHECKING:
    from leyline_agent.client import Client

_API_KEY_VARIABLE = "LEYLINE_API_KEY"
_CONVERSATION_VARIABLE = "LEYLINE_CONVERSATION"
_CACHE_SALT_VARIABLE = "LEYLINE_CACHE_SALT"


class _UnusableError(Exception):
    """Input that the command cannot work on, or a server that gives no answer; the exit code is 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except (LeylineError, _UnusableError) as error:
        print(f"leyline: {error}", file=sys.stderr)
        return 1 if isinstance(error, LeylineError) else 2
    except BrokenPipeError:
        # `leyline plan … | head`: the reader has seen enough. Else Python complains again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="leyline", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    validate = commands.add_parser("validate", help="check policies; 1 if any is wrong")
    validate.add_argument("policies", nargs="+", metavar="FILE", help="a YAML file or the name of a shipped policy")
    validate.add_argument("--json", action="store_true", help="print one JSON list instead of lines")
    validate.set_defaults(run=_validate)

    explain = commands.add_parser("explain", help="say in English what a policy does")
    explain.add_argument("policy", metavar="POLICY", help="a YAML file or the name of a shipped policy")
    explain.set_defaults(run=_explain)

    plan = commands.add_parser("plan", help="show what a policy would edit in a conversation")
    plan.add_argument("policy", metavar="POLICY", help="a YAML file or the name of a shipped policy")
    plan.add_argument("messages", metavar="MESSAGES", help="JSON: a list of chat messages, or {'messages': [...]}")
    plan.add_argument("--json", action="store_true", help="print JSON, with the replacements in full")
    plan.set_defaults(run=_plan)

    health = commands.add_parser("health", help="ask a server whether it runs the plugin; 1 if not, 2 if unreachable")
    _add_server(health)
    health.set_defaults(run=_health)

    conversation = commands.add_parser("conversation", help="show what a server has of a conversation")
    release = commands.add_parser("release", help="free what a server has of a conversation")
    release.add_argument("--scrub", action="store_true", help="also zero every row that nothing refers to")
    for command, run in ((conversation, _conversation), (release, _release)):
        # Anybody on the machine can read a command line, so the secrets are not on it.
        command.description = (
            f"The conversation's id is read from {_CONVERSATION_VARIABLE} or from stdin, the cache_salt of its "
            f"requests, if they have one, from {_CACHE_SALT_VARIABLE}."
        )
        _add_server(command)
        command.add_argument("--extra-key", default=None, help="that of the conversation's requests, if they have one")
        command.add_argument("--json", action="store_true", help="print the server's answer as JSON")
        command.set_defaults(run=run)
    return parser


def _add_server(command: argparse.ArgumentParser) -> None:
    command.add_argument("url", metavar="URL", help="where the server listens, such as http://127.0.0.1:30000")
    command.add_argument(
        "--api-key",
        default=None,
        help=f"the server's key; better set {_API_KEY_VARIABLE}, which `ps` does not show",
    )
    command.add_argument("--timeout", type=float, default=10.0, metavar="S", help="seconds to wait (default: 10)")


def _validate(args: argparse.Namespace) -> int:
    reports: list[dict[str, Any]] = []
    for policy in args.policies:
        try:
            load_policy(policy)
        except PolicyError as error:
            place = {"line": error.line, "column": error.column, "key": error.key}
            reports.append({"file": policy, "valid": False, "error": str(error), **place})
        else:
            reports.append({"file": policy, "valid": True})
    if args.json:
        print(json.dumps(reports, indent=2, ensure_ascii=False))
    else:
        for report in reports:
            if report["valid"]:
                print(f"{report['file']}: valid")
            else:
                print(report["error"], file=sys.stderr)
    return 0 if all(report["valid"] for report in reports) else 1


def _explain(args: argparse.Namespace) -> int:
    print(explain_policy(load_policy(args.policy)))
    return 0


def _plan(args: argparse.Namespace) -> int:
    policy = load_policy(args.policy)
    messages = _read_messages(args.messages)
    edits = policy_edits(policy, messages)
    rows = [_edit_row(edit, messages) for edit in edits]
    totals = {
        "num_messages": len(messages),
        "num_edits": len(edits),
        "chars_before": sum(row["chars_before"] for row in rows),
        "chars_after": sum(row["chars_after"] for row in rows),
    }
    if args.json:
        print(json.dumps({**totals, "edits": rows}, indent=2, ensure_ascii=False))
        return 0
    for row in rows:
        place = str(row["start"]) if row["end"] == row["start"] + 1 else f"{row['start']}-{row['end'] - 1}"
        print(
            f"{place:>9}  {'+'.join(row['roles']):<16.16}  {row['rule']}  {row['mode']}  "
            f"{row['chars_before']} -> {row['chars_after']} chars  {_one_line(row['replacement'])}"
        )
    print(
        f"{len(edits)} edits of {len(messages)} messages; in what they touch "
        f"{totals['chars_before']} -> {totals['chars_after']} characters"
    )
    return 0


def _read_messages(file: str) -> list[Message]:
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise _UnusableError(f"{file}: cannot read it: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise _UnusableError(f"{file}: not JSON: {error}") from error
    if isinstance(content, dict) and "messages" in content:
        content = content["messages"]
    try:
        return messages_from_openai(content)
    except ValueError as error:
        raise _UnusableError(f"{file}: {error}, or an object whose 'messages' is that list") from error


def _edit_row(edit: Edit, messages: Sequence[Message]) -> dict[str, Any]:
    before = messages[edit.start : edit.end]
    return {
        "start": edit.start,
        "end": edit.end,
        "roles": list(dict.fromkeys(message.role for message in before)),
        "rule": edit.rule,
        "mode": str(edit.mode),
        "chars_before": sum(num_chars(message) for message in before),
        "chars_after": sum(num_chars(message) for message in edit.replacement),
        "replacement": [message.to_openai() for message in edit.replacement],
    }


def _one_line(replacement: Sequence[Mapping[str, Any]]) -> str:
    if not replacement:
        return "(dropped)"
    text = " ".join(Message.from_openai(replacement[0]).text.split())
    return text if len(text) <= 60 else text[:59] + "…"


def _health(args: argparse.Namespace) -> int:
    # Here, since the other commands need no network and httpx is half of their start-up time.
    import httpx

    url = f"{args.url.rstrip('/')}/leyline/capabilities"
    key = args.api_key or os.environ.get(_API_KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(url, headers=headers, timeout=args.timeout)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _UnusableError(f"{url}: no answer: {error or type(error).__name__}; is the server up?") from error
    if response.status_code in (401, 403):
        raise LeylineError(f"{url}: got {response.status_code}; give the server's key in {_API_KEY_VARIABLE}")
    if response.status_code != 200:
        raise LeylineError(
            f"{url}: got {response.status_code}, expected 200: the server runs no Leyline plugin, or a gateway "
            "stands before it that does not pass this route on"
        )
    try:
        capabilities = response.json()
    except ValueError as error:
        raise LeylineError(f"{url}: the answer is not JSON, so it is not Leyline's: {response.text!r:.80}") from error
    if not isinstance(capabilities, dict):
        raise LeylineError(f"{url}: got {capabilities!r:.80}, expected an object")
    print(json.dumps(capabilities, indent=2, ensure_ascii=False))
    if capabilities.get("enabled") is False:
        raise LeylineError(f"{url}: the plugin is there and switched off")
    if capabilities.get("supported") is not True:
        raise LeylineError(f"{url}: the plugin is there and cannot splice on this server; see 'unsupported' above")
    return 0


def _conversation(args: argparse.Namespace) -> int:
    with _client(args) as client:
        state = client.conversation_state(_conversation_id(), **_scope(args))
    if args.json:
        print(state.model_dump_json(indent=2))
        return 0
    print(f"conversation {state.conversation_hash}: {state.own_tokens} tokens in a namespace of its own")
    for turn in state.turns:
        namespace = "own" if turn.own_namespace else "shared"
        print(
            f"{turn.turn:<24.24}  {turn.prompt_tokens} + {turn.output_tokens} tokens  "
            f"{turn.cached_tokens} cached ({namespace})  {len(turn.edits)} edits"
        )
        for edit in turn.edits:
            print(f"  {edit.edit_id} at {edit.position}: {edit.removed_tokens} -> {edit.replacement_tokens} tokens")
    return 0


def _release(args: argparse.Namespace) -> int:
    with _client(args) as client:
        reply = client.release(_conversation_id(), scrub=args.scrub, **_scope(args))
    if args.json:
        print(reply.model_dump_json(indent=2))
        return 0
    purge = reply.purge
    print(
        f"conversation {reply.conversation_hash}: {purge.dropped_tokens} tokens dropped, {purge.held_tokens} held by "
        f"running requests, {purge.scrubbed_tokens} scrubbed"
    )
    return 0


@contextmanager
def _client(args: argparse.Namespace) -> Iterator[Client]:
    # Imported here as in `_health`.
    from httpx import InvalidURL

    from leyline_agent.client import Client

    api_key = args.api_key or os.environ.get(_API_KEY_VARIABLE)
    try:
        with Client(args.url, api_key=api_key, timeout=args.timeout) as client:
            yield client
    except (SpliceTransportError, InvalidURL, ValueError) as error:
        raise _UnusableError(str(error)) from error


def _conversation_id() -> str:
    conversation_id = os.environ.get(_CONVERSATION_VARIABLE) or sys.stdin.readline().strip()
    if not conversation_id:
        raise _UnusableError(f"no conversation's id in {_CONVERSATION_VARIABLE} or on stdin")
    return conversation_id


def _scope(args: argparse.Namespace) -> dict[str, str | None]:
    return {"extra_key": args.extra_key, "cache_salt": os.environ.get(_CACHE_SALT_VARIABLE)}


if __name__ == "__main__":
    sys.exit(main())
