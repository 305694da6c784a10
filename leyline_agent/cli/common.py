"""What the commands share: the error that ends one, the server's key, JSON on stdout."""

from __future__ import annotations

import argparse
import json
import os

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


def print_json(value: object) -> None:
    """Print a value for programs; ASCII, so that no terminal's encoding matters."""
    print(json.dumps(value, indent=2))
