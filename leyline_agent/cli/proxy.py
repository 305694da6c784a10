"""The commands `proxy` and `stats`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from contextlib import suppress
from typing import Any

from leyline_agent.cli.common import UnusableError, ask, print_json
from leyline_agent.errors import LeylineError, PolicyError
from leyline_agent.policy import load_policy

_NUM_SHOWN = 20


def proxy(args: argparse.Namespace) -> int:
    """Serve an OpenAI-compatible API before another server and edit the conversations that pass."""
    policy = load_policy(args.policy, allow_python=args.allow_python)
    if args.context_window is not None:
        policy = policy.with_context_window(args.context_window)
    try:
        from leyline_agent.proxy.serve import STATS_KEY_VARIABLE, listen, make_server, read_key, serve
        from leyline_agent.proxy.settings import ProxySettings
    except ImportError as error:
        raise UnusableError(f"proxy: {error}") from error
    try:
        key, is_lasting = read_key(args.key_file)
        settings = ProxySettings(
            upstream=args.upstream,
            policy=policy,
            policy_name=args.policy,
            key=key,
            host=args.host,
            port=args.port,
            max_conversations=args.max_conversations,
            max_remembered_bytes=args.max_memory_mb << 20,
            max_body_bytes=args.max_body_mb << 20,
            timeout_s=args.timeout,
            stats_key=os.environ.get(STATS_KEY_VARIABLE) or None,
            scrub=args.scrub,
            gate=args.gate,
            template_changes=args.template_changes,
        )
        server = make_server(settings)
        listening = listen(settings)
    except PolicyError:
        raise
    except (ValueError, LeylineError) as error:
        raise UnusableError(f"proxy: {error}") from error
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s")
    host, port = listening.getsockname()[:2]
    print(f"leyline proxy: http://{f'[{host}]' if ':' in host else host}:{port}/v1 -> {args.upstream}", flush=True)
    print(f"policy: {args.policy}; stop it with Ctrl-C", flush=True)
    if not is_lasting:
        print("its key is random: after a restart named conversations begin anew (see --key-file)", flush=True)
    with suppress(KeyboardInterrupt):
        serve(server, listening)
    return 0


def stats(args: argparse.Namespace) -> int:
    """Ask a proxy what it did."""
    url, response = ask(args, "/leyline/proxy/stats", "proxy")
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if response.status_code in (401, 403) and isinstance(answer, dict):
        raise LeylineError(f"{url}: {(answer.get('error') or {}).get('message', response.status_code)}")
    if response.status_code != 200 or not isinstance(answer, dict) or "conversations" not in answer:
        raise LeylineError(f"{url}: got {response.status_code}, expected the stats of `leyline proxy`; is it one?")
    if args.json:
        print_json(answer)
    else:
        _print_stats(answer, args.all)
    return 0


def _print_stats(answer: dict[str, Any], show_all: bool) -> None:
    print(f"policy {answer['policy']}, upstream {answer['upstream']}, notes: {answer['notes']}")
    shown = answer["conversations"] if show_all else answer["conversations"][:_NUM_SHOWN]
    counts = f"{'kept':>11}{'moved':>11}{'recomputed':>12}"
    print(f"{'conversation':<13}{'turns':>6}{'splices':>8}{counts}{'hit':>7}  fallbacks")
    for row in shown:
        hit = "" if row["hit_rate"] is None else f"{row['hit_rate']:.1%}"
        print(_row(row["conversation"][:12], row, hit))
    if hidden := len(answer["conversations"]) - len(shown):
        print(f"… and {hidden:,} more, see --all")
    print(_row("all", answer["totals"], ""))
    if forgotten := answer["forgotten_conversations"]:
        print(f"with {forgotten:,} conversations that are remembered no more")
    for key, words in (
        ("unedited", "went through unedited"),
        ("without_note", "went without a note"),
        ("failures", "not answered by the upstream"),
    ):
        for reason, count in sorted(answer[key].items()):
            print(f"{words}: {count:,} ({reason})")
    if answer["unread_answers"]:
        print(f"answers that could not be read: {answer['unread_answers']:,}")


def _row(name: str, row: dict[str, Any], hit: str) -> str:
    fallbacks = ", ".join(f"{reason} {count}" for reason, count in sorted(row["fallbacks"].items()))
    counts = f"{row['kept_tokens']:>11,}{row['moved_tokens']:>11,}{row['recomputed_tokens']:>12,}"
    return f"{name:<13}{row['turns']:>6,}{row['splices']:>8,}{counts}{hit:>7}  {fallbacks}".rstrip()
