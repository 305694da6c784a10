"""What a replay can report to its caller, as opposed to a bug."""

from __future__ import annotations

from leyline_agent.errors import LeylineError


class ReplayError(LeylineError):
    """A replay cannot start or cannot go on; the message says what was found, what was expected and what to do."""


class TrajectoryError(ReplayError):
    """A trajectory file cannot be read as one."""
