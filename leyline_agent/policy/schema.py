"""What a policy can say: rules, what they select, what they do, and what is kept from them.

Pure values. `loader.py` reads them from YAML, `engine.py` carries them out; the prose is in `docs/policies.md`.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, model_validator
from pydantic_core import PydanticCustomError

from leyline_agent.core.protocol import Mode
from leyline_agent.errors import PolicyError
from leyline_agent.policy.stub import check_stub

Action = Literal["replace", "drop", "collapse"]
_ACTIONS: tuple[Action, ...] = ("replace", "drop", "collapse")

REPLACE_PLACEHOLDERS = ("lines",)
TOOL_PLACEHOLDERS = ("tool", "args", "lines")
COLLAPSE_PLACEHOLDERS = ("turns", "lines")


def _mistake(message: str, *path: str | int) -> PydanticCustomError:
    """Make an error about the value at `path` below the model that raises it."""
    return PydanticCustomError("policy", "{message}", {"message": message, "path": path})


def _only(expected: int | bool) -> BeforeValidator:
    """Take one value and nothing that merely equals it: to Python True, 1 and 1.0 are the same."""

    def check(value: object) -> object:
        if type(value) is not type(expected) or value != expected:
            shown = str(expected).lower()
            raise _mistake(f"expected {shown}, got {value!r}")
        return value

    return BeforeValidator(check)


def _listed(value: object) -> object:
    return (value,) if isinstance(value, str) else value


_Globs = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1), BeforeValidator(_listed)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Age(_Model):
    """How old a message has to be. A turn is one assistant message and everything that answers it."""

    turns: Annotated[StrictInt, Field(ge=0)]
    """At least this many later turns exist: 2 leaves the last two turns alone, 0 leaves none alone."""


class Select(_Model):
    """Which messages a rule is about; each condition that is given must hold."""

    role: Literal["tool", "user", "assistant"]
    """Whose messages. In text-only agents observations are user messages."""
    tool: _Globs | None = None
    """With `role: tool`: name of the tool that was called, one glob or a list of them. Case matters."""
    older_than: Age | None = None
    """Only messages of this age; without it the newest too."""
    opening: StrictBool = False
    """With `role: user`: also the messages that set the task, which are left alone otherwise."""

    @model_validator(mode="after")
    def _fits_role(self) -> Select:
        if self.tool is not None and self.role != "tool":
            raise _mistake(f"selects outputs by tool and needs 'role: tool', got 'role: {self.role}'", "tool")
        if self.opening and self.role != "user":
            raise _mistake(f"selects the task and needs 'role: user', got 'role: {self.role}'", "opening")
        return self


class Rule(_Model):
    """One sentence: what to select, and exactly one of `replace`, `drop` and `collapse`."""

    name: Annotated[str, Field(min_length=1)]
    """Unique in the policy; edits and logs carry it."""
    select: Select
    """What the rule is about."""
    replace: Annotated[str, Field(min_length=1)] | None = None
    """Put this stub in the place of a message's content. Placeholders: {lines}, of tool outputs {tool} and {args}."""
    drop: Annotated[Literal[True], _only(True)] | None = None
    """Remove the message: a tool output with its call, an assistant message with its results."""
    collapse: Annotated[str, Field(min_length=1)] | None = None
    """Put one stub in the place of consecutive tool turns. Placeholders: {turns}, {lines}."""
    mode: Mode = Mode.AMORTIZE
    """`amortize` keeps the KV of what follows; `forget` prefills it again, for what must not survive."""

    @property
    def action(self) -> Action:
        """The one that is given."""
        return next(action for action in _ACTIONS if getattr(self, action) is not None)

    @model_validator(mode="after")
    def _one_action(self) -> Rule:
        given = [action for action in _ACTIONS if getattr(self, action) is not None]
        if not given:
            raise _mistake(f"rule {self.name!r} does nothing; add one of replace, drop, collapse")
        if len(given) > 1:
            raise _mistake(
                f"rule {self.name!r} has {len(given)} actions, {' and '.join(given)}, expected one; "
                "write a rule for each",
                given[1],
            )
        if self.collapse is not None and self.select.role != "tool":
            raise _mistake(f"collapses tool turns and needs 'role: tool', got 'role: {self.select.role}'", "collapse")
        self._check_stubs()
        return self

    def _check_stubs(self) -> None:
        replacing = TOOL_PLACEHOLDERS if self.select.role == "tool" else REPLACE_PLACEHOLDERS
        for action, template, known in (
            ("replace", self.replace, replacing),
            ("collapse", self.collapse, COLLAPSE_PLACEHOLDERS),
        ):
            if template is None:
                continue
            try:
                check_stub(template, known)
            except ValueError as error:
                raise _mistake(str(error), action) from error


class Keep(_Model):
    """What no rule touches, whatever it selects."""

    last: Annotated[StrictInt, Field(ge=0)] | None = None
    """The last n results. Results are counted, not messages: tool outputs on their own, and on their own the user
    messages that follow an assistant message."""


class Policy(_Model):
    """What to edit in an agent's history."""

    version: Annotated[Literal[1], _only(1)]
    """Version of this language."""
    name: str | None = None
    """For people."""
    description: str | None = None
    """For people: when to use it, what it costs, what may go wrong."""
    rules: tuple[Rule, ...]
    """Carried out in order, each on what the ones before it left. An empty list edits nothing."""
    keep: Keep = Keep()
    """What no rule touches."""

    @model_validator(mode="after")
    def _unique_names(self) -> Policy:
        seen: Counter[str] = Counter()
        for idx, rule in enumerate(self.rules):
            if seen[rule.name]:
                raise _mistake(f"got a second rule {rule.name!r}; give each a name of its own", "rules", idx, "name")
            seen[rule.name] += 1
        return self

    def with_turns(self, turns: int) -> Policy:
        """Return a copy whose rules select messages older than `turns` turns.

        Raises:
            PolicyError: `turns` is no whole number of 0 or more; no rule selects by age; or rules do by different
                ages, so that one number cannot stand for them.
        """
        if type(turns) is not int or turns < 0:
            raise PolicyError(f"got turns = {turns!r}, expected a whole number of 0 or more")
        ages = {rule.select.older_than.turns for rule in self.rules if rule.select.older_than is not None}
        if len(ages) != 1:
            found = f"rules of different ages {sorted(ages)}" if ages else "no rule that selects by age"
            raise PolicyError(f"cannot set turns = {turns} in policy {self.name!r}: it has {found}; edit its YAML")
        return self.model_copy(update={"rules": tuple(_rule_with_turns(rule, turns) for rule in self.rules)})


def _rule_with_turns(rule: Rule, turns: int) -> Rule:
    if rule.select.older_than is None:
        return rule
    select = rule.select.model_copy(update={"older_than": Age(turns=turns)})
    return rule.model_copy(update={"select": select})
