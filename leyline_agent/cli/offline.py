"""The commands that need no server: policies, validate, explain, compare, plan."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyline_agent.cli.common import UnusableError, api_key, check_url, print_json
from leyline_agent.errors import PolicyError
from leyline_agent.policy import Policy, load_policy, policy_library, shipped_policies

if TYPE_CHECKING:
    from leyline_agent.explain import Meter, Preview, RecordedConversation
    from leyline_agent.tokenizers import Tokenizer

_WIDTH = 100


def policies(args: argparse.Namespace) -> int:
    """List the shipped policies."""
    library = policy_library()
    if args.json:
        keys = ("name", "description", "when", "cost", "risk")
        print_json([{**{key: getattr(entry, key) for key in keys}, "path": str(entry.path)} for entry in library])
        return 0
    for entry in library:
        line = f"{entry.name:<30} {entry.description}"
        print(line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…")
    return 0


def validate(args: argparse.Namespace) -> int:
    """Check policies."""
    reports: list[dict[str, Any]] = []
    for policy in args.policies:
        try:
            load_policy(policy, allow_python=args.allow_python)
        except PolicyError as error:
            first, *others = ({"error": str(e), **_place(e)} for e in (error, *error.others))
            reports.append({"file": policy, "valid": False, **first, "others": others})
        else:
            reports.append({"file": policy, "valid": True})
    if args.json:
        print_json(reports)
    else:
        for report in reports:
            if report["valid"]:
                print(f"{report['file']}: valid")
            else:
                print(*(each["error"] for each in (report, *report["others"])), sep="\n", file=sys.stderr)
    return 0 if all(report["valid"] for report in reports) else 1


def explain(args: argparse.Namespace) -> int:
    """Say what a policy does, and preview it on a conversation."""
    from leyline_agent.explain.text import preview_as_text, prose

    policy = _policy(args, args.policy, "explain")
    if args.trajectory is None:
        if args.html or args.json or args.directives or args.tokenizer or args.server:
            raise UnusableError("explain: all options are about a recorded conversation: give a TRAJECTORY too")
        print(prose(policy))
        return 0
    conversation = _conversation_file(args.trajectory)
    with _meter(args, conversation) as meter:
        preview = _preview(args, policy, args.policy, conversation, meter)
    if args.html:
        from leyline_agent.explain.page import preview_as_page

        _write(args.html, preview_as_page(preview))
    if args.json:
        print_json(preview.as_json(directives=args.directives))
    elif args.html:
        print(f"wrote {args.html}")
    else:
        print(preview_as_text(preview, directives=args.directives))
    return 0


def compare(args: argparse.Namespace) -> int:
    """Put previews of several policies side by side."""
    from leyline_agent.explain.text import comparison_as_text

    names = [*args.policies, *(name for name in shipped_policies() if args.all and name not in args.policies)]
    if not names:
        raise UnusableError("compare: got no policy; name some, or say --all")
    policies = [(name, _policy(args, name, "compare")) for name in names]
    conversation = _conversation_file(args.trajectory)
    with _meter(args, conversation) as meter:
        previews = [_preview(args, policy, name, conversation, meter) for name, policy in policies]
    if args.json:
        first = previews[0]
        rows = [{"policy": preview.policy_name, **preview.totals()} for preview in previews]
        counted = {"counted": first.counted, "exact": first.is_exact}
        print_json({"trajectory": conversation.file, "source": conversation.source, **counted, "policies": rows})
    else:
        print(comparison_as_text(previews))
    return 0


def plan(args: argparse.Namespace) -> int:
    """Print the directives of one turn."""
    from leyline_agent.explain import ExactMeter
    from leyline_agent.explain.turn_plan import plan_as_json

    policy = _policy(args, args.policy, "plan")
    if not args.tokenizer and not args.server:
        raise UnusableError(
            "plan: directives are made of token ids: give --tokenizer PATH or --server URL; without either "
            "`leyline explain --directives` estimates how long they are"
        )
    conversation = _conversation_file(args.trajectory)
    with _meter(args, conversation) as meter:
        assert isinstance(meter, ExactMeter)
        try:
            with _naming(args.policy):
                found = plan_as_json(policy, conversation, meter, args.turn, context_window=args.context_window)
            print_json(found)
        except ValueError as error:
            raise UnusableError(f"plan: {error}") from error
    return 0


def _place(error: PolicyError) -> dict[str, Any]:
    return {"line": error.line, "column": error.column, "key": error.key}


def _policy(args: argparse.Namespace, name: str, command: str) -> Policy:
    try:
        return load_policy(name, allow_python=args.allow_python)
    except PolicyError as error:
        is_key_known = error.key is not None and (not error.key.isidentifier() or error.key in Policy.model_fields)
        if is_key_known or not name.endswith(".json") or not Path(name).is_file():
            raise
        # JSON is YAML: what the loader says of a recording is that it has not the keys of a policy.
        raise UnusableError(f"{command}: {name} is no policy; name one before the recording") from error


def _conversation_file(file: str) -> RecordedConversation:
    from leyline_agent.explain import ConversationFileError, read_conversation

    try:
        return read_conversation(file)
    except ConversationFileError as error:
        raise UnusableError(str(error)) from error


@contextmanager
def _meter(args: argparse.Namespace, conversation: RecordedConversation) -> Iterator[Meter]:
    from leyline_agent.explain import EstimatedMeter, ExactMeter

    if args.tokenizer:
        yield ExactMeter(conversation, _local_tokenizer(args.tokenizer), f"the tokenizer in {args.tokenizer}")
    elif args.server:
        from httpx import InvalidURL

        from leyline_agent.tokenizers import ServerTokenizer

        try:
            tokenizer = ServerTokenizer(check_url(args.server), api_key=api_key(args), timeout=args.timeout)
        except (InvalidURL, ValueError) as error:
            raise UnusableError(f"{args.server}: {error}") from error
        try:
            yield ExactMeter(conversation, tokenizer, f"the server {args.server}")
        except InvalidURL as error:
            raise UnusableError(f"{args.server}: {error}") from error
        finally:
            tokenizer.close()
    else:
        yield EstimatedMeter(conversation)


def _local_tokenizer(path: str) -> Tokenizer:
    from leyline_agent.tokenizers import LocalTokenizer

    if not Path(path).is_dir():
        raise UnusableError(f"{path}: no such folder; expected one with tokenizer.json and a chat template")
    try:
        return LocalTokenizer.from_pretrained(path)
    except (OSError, ValueError, ImportError) as error:
        raise UnusableError(f"{path}: no tokenizer could be loaded from it: {error}") from error


def _preview(
    args: argparse.Namespace, policy: Policy, name: str, conversation: RecordedConversation, meter: Meter
) -> Preview:
    from leyline_agent.explain import RenderError, preview

    try:
        with _naming(name):
            return preview(policy, conversation, meter, name=name, context_window=args.context_window)
    except RenderError as error:
        raise UnusableError(f"{conversation.file}: {error}") from error


@contextmanager
def _naming(policy: str) -> Iterator[None]:
    """Have errors of a policy that is carried out say which policy it is, as those of its file do."""
    try:
        yield
    except PolicyError as error:
        raise PolicyError(str(error), file=policy) from error


def _write(file: str, text: str) -> None:
    try:
        # What JSON can say and UTF-8 cannot, half of a surrogate pair, becomes a question mark.
        Path(file).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UnusableError(f"{file}: cannot write it: {error.strerror or error}") from error
