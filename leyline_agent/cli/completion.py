"""The command `completion`: a script for a shell."""

from __future__ import annotations

import argparse

from leyline_agent.cli.common import UnusableError
from leyline_agent.policy import shipped_policies

SHELLS = ("bash", "zsh", "fish")


def completion(args: argparse.Namespace) -> int:
    """Print a shell's script."""
    try:
        import shtab
    except ImportError as error:
        raise UnusableError("completion: needs shtab: pip install '/path/to/leyline[completion]'") from error
    # Imported late, since that module has this command in its parser.
    from leyline_agent.cli.command import make_parser

    names = " ".join(shipped_policies())
    # The names of shipped policies, and files.
    policy = {
        "bash": "_leyline_policies",
        "zsh": "_leyline_policies",
        "fish": f"(printf '%s\\n' {names}; __fish_complete_path (commandline -ct))",
    }
    functions = {
        "bash": f'_leyline_policies() {{ compgen -W "{names}" -- "$1"; compgen -f -- "$1"; }}',
        "zsh": f"_leyline_policies() {{ compadd {names}; _files }}",
    }

    def mark(action: argparse.Action, kind: str) -> None:
        action.complete = policy if kind == "policy" else shtab.FILE  # type: ignore[attr-defined]

    print(shtab.complete(make_parser(mark), shell=args.shell, preamble=functions.get(args.shell, "")))
    return 0
