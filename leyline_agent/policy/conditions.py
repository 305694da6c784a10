"""When a rule fires and what it leaves alone: the models of `when` and `keep`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictBool, StrictFloat, StrictInt, WithJsonSchema, model_validator

from leyline_agent.policy.selecting import Model
from leyline_agent.policy.values import Count, EveryTurns, Globs, Positive, mistake

Share = Annotated[
    StrictFloat | StrictInt,
    Field(gt=0, le=1),
    WithJsonSchema({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
]
"""Of a whole."""


class When(Model):
    """What has to hold for a rule to fire; of several keys all must hold. Without it a rule fires at every turn.

    Sizes are those of the prompt as earlier edits leave it, so a rule that has made room rests until it fills up again.
    """

    tokens: Positive | None = None
    """The prompt has at least this many tokens, tools and system prompt included."""
    messages: Positive | None = None
    """The prompt has at least this many messages."""
    tool_uses: Positive | None = None
    """The prompt has at least this many tool outputs that no rule has replaced or cut."""
    turns: Positive | None = None
    """The conversation has at least this many turns, edited or not."""
    context: Share | None = None
    """The prompt takes at least this share of the context window, such as 0.7."""
    every: EveryTurns | None = None
    """The number of turns is a multiple of this: `5 turns` makes edits come in batches."""
    all_of: Annotated[tuple[When, ...], Field(min_length=1)] | None = None
    """Each of these holds."""
    any_of: Annotated[tuple[When, ...], Field(min_length=1)] | None = None
    """One of these holds."""

    @model_validator(mode="after")
    def _says_something(self) -> When:
        keys = type(self).model_fields
        if all(getattr(self, key) is None for key in keys):
            raise mistake(f"says nothing; expected one of {', '.join(keys)}")
        return self


def tokens_needed(when: When) -> tuple[int, tuple[str | int, ...]]:
    """Return the least tokens of a prompt at which a trigger can fire, and the path of the condition that says so."""
    needed: list[tuple[int, tuple[str | int, ...]]] = [(when.tokens or 0, ("tokens",))]
    for idx, part in enumerate(when.all_of or ()):
        tokens, path = tokens_needed(part)
        needed.append((tokens, ("all_of", idx, *path)))
    choices = [tokens_needed(part) for part in when.any_of or ()]
    if choices:
        idx = min(range(len(choices)), key=lambda idx: choices[idx][0])
        needed.append((choices[idx][0], ("any_of", idx, *choices[idx][1])))
    return max(needed, key=lambda each: each[0])


class Keep(Model):
    """What a rule leaves alone, whatever it selects.

    Results are counted, not messages: tool outputs, and, counted on their own, the user messages that follow an
    assistant message.
    """

    last: Count | None = None
    """The last n results."""
    last_turns: Count | None = None
    """Everything in the last n turns."""
    last_tokens: Count | None = None
    """The newest results, as many as fit into n tokens."""
    first: Count | None = None
    """The first n results."""
    errors: StrictBool = False
    """Tool outputs that report an error."""
    tagged: Globs | None = None
    """Messages that have such a tag: one glob or a list of them."""
    rereads: StrictBool = False
    """The newest output of a call that was made again after its earlier output had been edited away: whoever asks
    twice needs it, and would ask again."""
    min_reclaim_tokens: Positive | None = None
    """Edit only when at least this many tokens go at once; until then nothing is edited."""
    stop_after_tokens: Positive | None = None
    """Stop, oldest first, as soon as this many tokens went; the rest is left for the next time."""

    @model_validator(mode="after")
    def _can_be_met(self) -> Keep:
        gate, stop = self.min_reclaim_tokens, self.stop_after_tokens
        if gate is not None and stop is not None and stop < gate:
            raise mistake(
                f"stops after {stop} tokens and edits only from {gate} tokens on, so it may never edit; raise "
                "stop_after_tokens or lower min_reclaim_tokens",
                "stop_after_tokens",
            )
        return self
