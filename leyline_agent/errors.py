"""The errors that Leyline raises, all below one root.

LeylineError
├── PolicyError            a policy file is wrong (file, line, key)
├── PlanError              token ids, directives or spans do not fit each other (reason)
├── RenderError            a chat request cannot be rendered into token ids here
├── SpliceTransportError   the server could not be reached, answered an error, or its answer could not be read
├── SpliceRejectedError    refused by the server: a call of one of its routes or, with `strict=True`, an edit (reason)
└── UnsupportedServerError the server runs no Leyline plugin: told of its routes and, with `strict=True`, of a turn
"""

from __future__ import annotations

from collections.abc import Iterable


class LeylineError(Exception):
    """Root of every error that this project raises on purpose."""


class PolicyError(LeylineError):
    """A policy cannot be loaded or cannot mean anything.

    `file`, `line` (1-based), `column` (1-based) and `key` say where; each is None where it is not known. Of several
    mistakes of a file this is the first one; `others` has the rest, in order, and a traceback shows them as notes.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        line: int | None = None,
        column: int | None = None,
        key: str | None = None,
    ) -> None:
        self.file, self.line, self.column, self.key = file, line, column, key
        self.others: tuple[PolicyError, ...] = ()
        place = ":".join(str(part) for part in (file, line, column) if part is not None)
        super().__init__(": ".join(part for part in (place, key, message) if part))

    @classmethod
    def of_all(cls, mistakes: Iterable[PolicyError]) -> PolicyError:
        """Return the first mistake of a file, with the others; of several at one place the first given is kept."""
        found: dict[tuple[int, int, str], PolicyError] = {}
        for mistake in mistakes:
            found.setdefault((mistake.line or 0, mistake.column or 0, mistake.key or ""), mistake)
        first, *others = (found[place] for place in sorted(found))
        first.others = tuple(others)
        for other in others:
            first.add_note(str(other))
        return first


class PlanError(LeylineError):
    """Directives do not fit the token ids they were made for.

    `reason` is a `protocol.Reason` value, so that a server can answer with it.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        self.reason = reason
        super().__init__(message)


class RenderError(LeylineError, ValueError):
    """A tokenizer cannot render a chat request as the server would."""


class SpliceTransportError(LeylineError):
    """A request of ours got no readable answer."""


class SpliceRejectedError(LeylineError):
    """The server refused an edit, or a call of one of its routes.

    The prompt of a turn was answered all the same, after a re-prefill. `reason` is the machine-readable reason that the
    server gave.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        self.reason = reason
        super().__init__(message)


class UnsupportedServerError(LeylineError):
    """The server answered without an outcome, or has no such route, so it runs no Leyline plugin."""
