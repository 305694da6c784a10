"""The command `leyline`: check policies and preview what they do, ask a server what it can do and what it holds."""

from leyline_agent.cli.command import main

__all__ = ["main"]
