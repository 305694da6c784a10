"""What the commands share: the error that ends one, the server's key, JSON on stdout."""

from __future__ import annotations

import argparse
import json
import os
import sys
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

_PIECES_AT_ONCE = 100_000
"""Of JSON: brackets, keys and values, so some megabytes."""
API_KEY_VARIABLE = "LEYLINE_API_KEY"


class UnusableError(Exception):
    """Input that the command cannot work on, or a server that gives no answer; the exit code is 2."""


def api_key(args: argparse.Namespace) -> str | None:
    """Return the server's key, from the command line or the environment."""
    return args.api_key or os.environ.get(API_KEY_VARIABLE)


def check_url(url: str) -> str:
    """Return a server's root, whether or not its URL ends with a slash or `/v1`.

    Raises:
        UnusableError: it does not begin with http:// or https://.
    """
    if not url.startswith(("http://", "https://")):
        raise UnusableError(f"{url}: expected a URL such as http://127.0.0.1:30000; it begins with http:// or https://")
    return url.rstrip("/").removesuffix("/v1")


def ask(args: argparse.Namespace, path: str, what: str) -> tuple[str, httpx.Response]:
    """Get a path of the server that the command was given, with its key; return the URL asked and the response.

    Raises:
        UnusableError: there is no answer; `what` says who should have given it.
    """
    # Here, since the other commands need no network and httpx is half of their start-up time.
    import httpx

    url = f"{check_url(args.url)}{path}"
    key = api_key(args)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        return url, httpx.get(url, headers=headers, timeout=args.timeout)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnusableError(f"{url}: no answer: {error or type(error).__name__}; is the {what} up?") from error


def print_json(value: object) -> None:
    """Print a value for programs; ASCII, so that no terminal's encoding matters."""
    # Piece by piece: each turn of a long preview has all its messages, which as one text are gigabytes.
    pieces = json.JSONEncoder(indent=2).iterencode(value)
    while text := "".join(islice(pieces, _PIECES_AT_ONCE)):
        sys.stdout.write(text)
    print()
