"""What a rule can select: the models of `select`, and what a selection must not say."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    WithJsonSchema,
    model_validator,
)

from leyline_agent.policy.patterns import PatternError, compile_pattern
from leyline_agent.policy.values import Count, Globs, NonEmpty, Positive, covers, listed, mistake, only

Role = Literal["tool", "user", "assistant", "system"]
_ROLES = {"enum": ["tool", "user", "assistant", "system"]}
Roles = Annotated[
    tuple[Role, ...],
    Field(min_length=1),
    BeforeValidator(listed),
    WithJsonSchema({"anyOf": [_ROLES, {"type": "array", "items": _ROLES, "minItems": 1}]}),
]


class Model(BaseModel):
    """Base of everything that stands in a policy: nothing unknown, nothing changed later."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Age(Model):
    """How old a message has to be. A turn is one assistant message and everything that answers it."""

    turns: Count
    """At least this many later turns exist: 2 leaves the last two turns alone, 0 leaves none alone."""


class Size(Model):
    """How large a message has to be."""

    tokens: Positive
    """More than this many tokens, as the policy's counter counts them."""


class IndexRange(Model):
    """Places in the list of messages, both ends included. 0 is the first message, -1 the last."""

    from_: Annotated[StrictInt, Field(alias="from")] = 0
    """The first place."""
    to: StrictInt = -1
    """The last place. `-11` leaves the last ten messages alone."""

    @model_validator(mode="after")
    def _not_empty(self) -> IndexRange:
        if self.from_ > self.to and (self.from_ < 0) == (self.to < 0):
            raise mistake(
                f"no message lies from {self.from_} to {self.to}, so the rule can never fire; exchange them", "from"
            )
        return self


class Superseded(Model):
    """Which later call makes an output stale: one of the same tool with the same value of an argument."""

    argument: Globs
    """Name of the argument that says what was read, such as `path`; of several names the first that a call has."""


class Select(Model):
    """Which messages a rule is about; each condition that is given must hold."""

    role: Roles
    """Whose messages: one role or a list. In text-only agents observations are user messages."""
    tool: Globs | None = None
    """Name of the tool: one glob or a list of them. Case matters. With `role: tool` the tool that was called, with
    `role: assistant` one that the message calls."""
    exclude_tool: Globs | None = None
    """Names of tools that are left alone, as `tool` has them."""
    id: Globs | None = None
    """The message's `id`, or of a tool output the id of its call: one glob or a list of them."""
    tag: Globs | None = None
    """A tag that the message has in its key `tags`, a list of words: one glob or a list of them."""
    older_than: Age | None = None
    """Only messages of this age; without it the newest too."""
    index: StrictInt | IndexRange | None = None
    """Only messages at this place, or in this range, of the list as it is at the time; -1 is the last."""
    larger_than: Size | None = None
    """Only messages of this size."""
    matches: NonEmpty | None = None
    """A regular expression that occurs in the text, as in Python, without backreferences and lookaround; `^` and `$`
    are the edges of a line, and `\\w`, `\\d`, `\\s` and `\\b` know ASCII alone."""
    is_error: Annotated[Literal[True], only(True)] | None = None
    """With `role: tool`: outputs that report an error."""
    superseded: Annotated[Literal[True], only(True)] | Superseded | None = None
    """With `role: tool`: outputs of calls that were made again later and answered without an error. `true` asks for the
    same arguments, `{argument: path}` for the same path."""
    python: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] | None = None
    """A function `package.module:function` that is given the messages and returns the indices of those to select. It
    only ever runs if whoever loads the policy allows it by this name."""
    opening: StrictBool = False
    """With `role: user`: also the messages that set the task, which are left alone otherwise."""

    @model_validator(mode="after")
    def _fits_role(self) -> Select:
        got = f"got 'role: {', '.join(self.role)}'"
        if not set(self.role) <= {"tool", "assistant"}:
            for key in ("tool", "exclude_tool"):
                if getattr(self, key) is not None:
                    raise mistake(f"selects by tool and needs 'role: tool' or 'role: assistant', {got}", key)
        for key in ("is_error", "superseded"):
            if getattr(self, key) is not None and set(self.role) != {"tool"}:
                raise mistake(f"is about tool outputs and needs 'role: tool', {got}", key)
        if self.opening and "user" not in self.role:
            raise mistake(f"selects the task and needs 'role: user', {got}", "opening")
        return self

    @model_validator(mode="after")
    def _can_hold(self) -> Select:
        if self.exclude_tool is not None and covers(self.exclude_tool, self.tool or ("*",)):
            raise mistake("every tool that is selected is left alone, so the rule can never fire", "exclude_tool")
        first = self.index.from_ if isinstance(self.index, IndexRange) else self.index
        if first is not None and 0 < -first <= self.min_age:
            # Each later turn has a message of its own.
            last = "message is" if first == -1 else f"{-first} messages are"
            age = "a turn" if self.min_age == 1 else f"{self.min_age} turns"
            raise mistake(
                f"the last {last} never older than {age}, so the rule can never fire; select other places, or leave "
                "'older_than' out",
                "index",
            )
        if self.matches is not None:
            try:
                compile_pattern(self.matches)
            except PatternError as error:
                raise mistake(str(error), "matches") from error
        return self

    @property
    def min_age(self) -> int:
        """The age in turns from which on a message is selected."""
        return 0 if self.older_than is None else self.older_than.turns
