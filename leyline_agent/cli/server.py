"""The commands that ask a server: health, conversation, release."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from leyline_agent.cli.common import API_KEY_VARIABLE, UnusableError, api_key, ask, check_url, print_json
from leyline_agent.errors import LeylineError, SpliceTransportError

if TYPE_CHECKING:
    from leyline_agent.client import Client
    from leyline_agent.core.protocol import PastEdit

CONVERSATION_VARIABLE = "LEYLINE_CONVERSATION"
CACHE_SALT_VARIABLE = "LEYLINE_CACHE_SALT"


def health(args: argparse.Namespace) -> int:
    """Ask a server whether it can splice."""
    url, response = ask(args, "/leyline/capabilities", "server")
    if response.status_code in (401, 403):
        raise LeylineError(f"{url}: got {response.status_code}; give the server's key in {API_KEY_VARIABLE}")
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
    if args.json:
        print_json(capabilities)
    else:
        _print_health(capabilities)
    if capabilities.get("enabled") is False:
        raise LeylineError(f"{url}: the plugin is there and switched off")
    if capabilities.get("supported") is not True:
        raise LeylineError(f"{url}: the plugin is there and cannot splice on this server; what it refuses is above")
    return 0


def _print_health(capabilities: dict[str, Any]) -> None:
    """Print what people ask first; `--json` has the rest."""
    able = capabilities.get("supported") is True and capabilities.get("enabled") is not False
    print(f"can splice: {'yes' if able else 'no'}")
    for key, words in (("version", "plugin"), ("sglang", "SGLang"), ("protocol", "protocol")):
        if key in capabilities:
            print(f"{words}: {capabilities[key]}")
    for reason in _listed(capabilities, "unsupported"):
        print(f"refuses all splices, since: {reason}")
    for reason in _listed(capabilities, "not_in_one_step"):
        print(f"computes a stub in a step of its own, since: {reason}")
    installed = _listed(capabilities, "installed")
    if installed:
        print(textwrap.fill(f"installed: {', '.join(installed)}", 100, subsequent_indent=" " * 11))
    for key in ("conversations", "remembered_tokens"):
        if key in capabilities:
            print(f"{key.replace('_', ' ')}: {capabilities[key]:,}")


def _listed(capabilities: dict[str, Any], key: str) -> list[str]:
    listed = capabilities.get(key)
    return [str(entry) for entry in listed] if isinstance(listed, list) else []


def conversation(args: argparse.Namespace) -> int:
    """Show what a server has of a conversation."""
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
        _print_edits(turn.edits)
    if state.explicit_edits:
        print("by explicit splices")
        _print_edits(state.explicit_edits)
    return 0


def _print_edits(edits: Sequence[PastEdit]) -> None:
    for edit in edits:
        print(f"  {edit.edit_id} at {edit.position}: {edit.removed_tokens} -> {edit.replacement_tokens} tokens")


def release(args: argparse.Namespace) -> int:
    """Free what a server has of a conversation."""
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
    # Imported here as in `ask`.
    from httpx import InvalidURL

    from leyline_agent.client import Client

    try:
        with Client(check_url(args.url), api_key=api_key(args), timeout=args.timeout) as client:
            yield client
    except (SpliceTransportError, InvalidURL, ValueError) as error:
        raise UnusableError(str(error)) from error


def _conversation_id() -> str:
    conversation_id = os.environ.get(CONVERSATION_VARIABLE) or sys.stdin.readline().strip()
    if not conversation_id:
        raise UnusableError(f"no conversation's id in {CONVERSATION_VARIABLE} or on stdin")
    return conversation_id


def _scope(args: argparse.Namespace) -> dict[str, str | None]:
    return {"extra_key": args.extra_key, "cache_salt": os.environ.get(CACHE_SALT_VARIABLE)}
