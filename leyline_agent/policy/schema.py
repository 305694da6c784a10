"""What a policy can say: rules, what they select, what they do, and when.

Pure values. `loader.py` reads them from YAML, `engine.py` carries them out; the prose is in `docs/policies.md`, and
every field's line here is also its line in `docs/policy-reference.md`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import PrivateAttr, model_validator

from leyline_agent.core.messages import Message
from leyline_agent.core.protocol import Mode
from leyline_agent.errors import PolicyError
from leyline_agent.policy.conditions import Keep, When, tokens_needed
from leyline_agent.policy.patterns import compile_pattern
from leyline_agent.policy.selecting import Age, Model, Select
from leyline_agent.policy.stub import check_stub
from leyline_agent.policy.values import NonEmpty, Positive, TextAmount, covers, mistake, only

Action = Literal["replace", "drop", "collapse", "truncate", "clear_arguments", "drop_reasoning", "redact"]
ACTIONS: tuple[Action, ...] = (
    "replace",
    "drop",
    "collapse",
    "truncate",
    "clear_arguments",
    "drop_reasoning",
    "redact",
)
Detector = Callable[[Sequence[Message]], Iterable[int]]
"""Given the messages so far, return the indices of those to select."""

REPLACE_PLACEHOLDERS = ("lines", "tokens", "turns", "ref")
TOOL_PLACEHOLDERS = ("tool", "args", *REPLACE_PLACEHOLDERS)
COLLAPSE_PLACEHOLDERS = ("turns", "lines", "tokens", "ref")
CUT_PLACEHOLDERS = ("lines", "tokens")

_True = Annotated[Literal[True], only(True)]


class Truncate(Model):
    """Keep the beginning and the end of a text, and put a stub in the place of what lies between."""

    head: TextAmount | None = None
    """How much of the beginning stays, such as `20 lines` or `2000 chars`."""
    tail: TextAmount | None = None
    """How much of the end stays."""
    stub: NonEmpty = "[{lines} lines, {tokens} tokens cut]"
    """What stands for the part that was cut. Placeholders: {lines} and {tokens} of that part."""

    @model_validator(mode="after")
    def _keeps_something(self) -> Truncate:
        if not (self.head and self.head.number) and not (self.tail and self.tail.number):
            raise mistake("keeps nothing; give head, tail or both, or use 'replace'")
        _check(self.stub, CUT_PLACEHOLDERS, "stub")
        return self


class ClearArguments(Model):
    """Clear only the long arguments of a call."""

    longer_than: TextAmount
    """Arguments longer than this, such as `500 chars`, are cleared; shorter ones stay."""
    stub: NonEmpty = "[cleared: {lines} lines, {tokens} tokens]"
    """What stands for a cleared argument. Placeholders: {lines} and {tokens}."""

    @model_validator(mode="after")
    def _stub_fits(self) -> ClearArguments:
        _check(self.stub, CUT_PLACEHOLDERS, "stub")
        return self


class Rule(Model):
    """One sentence: what to select, one action, and where it differs from the policy's, when, and what to keep."""

    name: NonEmpty
    """Unique in the policy; edits and logs carry it."""
    select: Select
    """What the rule is about."""
    replace: NonEmpty | None = None
    """Put this stub in the place of a message's content. Placeholders: {lines} and {tokens} of what was there, {turns}
    that passed since, {ref}, the id by which the message is found again; of tool outputs also {tool} and {args}."""
    drop: _True | None = None
    """Remove the message: a tool output with its call, an assistant message with its results."""
    collapse: NonEmpty | None = None
    """Put one stub in the place of consecutive tool turns. Placeholders: {turns}, {lines} and {tokens} of what was
    there, {ref} of the first."""
    truncate: Truncate | None = None
    """Keep head and tail of the text."""
    clear_arguments: _True | ClearArguments | None = None
    """Clear the arguments of calls: with `role: tool` of the call that the output answers, with `role: assistant` of
    all that the message makes. `true` leaves an empty object."""
    drop_reasoning: _True | None = None
    """With `role: assistant`: remove the model's reasoning and keep what it said."""
    redact: NonEmpty | None = None
    """Put this in the place of every text that `matches` finds, in contents, reasoning and arguments."""
    mode: Mode = Mode.AMORTIZE
    """`amortize` keeps the KV of what follows; `forget` prefills it again, for what must not survive. `redact` forgets
    unless told otherwise."""
    when: When | None = None
    """When this rule fires, instead of the policy's `when`."""
    keep: Keep | None = None
    """What this rule leaves alone, instead of the policy's `keep`."""

    @property
    def action(self) -> Action:
        """The one that is given."""
        return next(action for action in ACTIONS if getattr(self, action) is not None)

    @model_validator(mode="before")
    @classmethod
    def _redacting_forgets(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("redact") is not None and "mode" not in given:
            return {**given, "mode": Mode.FORGET}
        return given

    @model_validator(mode="after")
    def _one_action(self) -> Rule:
        given = [action for action in ACTIONS if getattr(self, action) is not None]
        if not given:
            raise mistake(f"rule {self.name!r} does nothing; add one of {', '.join(ACTIONS)}")
        if len(given) > 1:
            raise mistake(
                f"rule {self.name!r} has {len(given)} actions, {' and '.join(given)}, expected one; "
                "write a rule for each",
                given[1],
            )
        return self

    @model_validator(mode="after")
    def _action_fits_roles(self) -> Rule:
        roles = set(self.select.role)
        got = f"got 'role: {', '.join(self.select.role)}'"
        action = self.action
        if action == "collapse" and roles != {"tool"}:
            raise mistake(f"collapses tool turns and needs 'role: tool', {got}", action)
        if action == "drop_reasoning" and roles != {"assistant"}:
            raise mistake(f"is about what the model thought and needs 'role: assistant', {got}", action)
        if action == "clear_arguments" and not roles <= {"tool", "assistant"}:
            raise mistake(f"is about calls and needs 'role: tool' or 'role: assistant', {got}", action)
        if "system" in roles and action != "redact":
            raise mistake("system messages can only be redacted; take 'system' out of the roles", "select", "role")
        if self.replace is not None:
            _check(self.replace, TOOL_PLACEHOLDERS if roles == {"tool"} else REPLACE_PLACEHOLDERS, action)
        if self.collapse is not None:
            _check(self.collapse, COLLAPSE_PLACEHOLDERS, action)
        return self

    @model_validator(mode="after")
    def _leaves_something_to_edit(self) -> Rule:
        keep = self.keep
        if keep is not None and self.select.is_error and keep.errors:
            raise mistake("keeps the errors that the rule selects, so it can never fire", "keep", "errors")
        if keep is not None and self.select.tag is not None and covers(keep.tagged or (), self.select.tag):
            raise mistake("keeps the tags that the rule selects, so it can never fire", "keep", "tagged")
        return self

    @model_validator(mode="after")
    def _redacts_what_matches(self) -> Rule:
        if self.redact is None:
            return self
        source = self.select.matches
        if source is None:
            raise mistake("needs a pattern of what to redact: add 'matches' to the selection", "redact")
        if compile_pattern(source).search(self.redact):
            raise mistake(f"got {self.redact!r}, which the pattern finds again; write another text", "redact")
        return self


class Policy(Model):
    """What to edit in an agent's history."""

    version: Annotated[Literal[1], only(1)]
    """Version of this language."""
    name: str | None = None
    """For people."""
    description: str | None = None
    """For people: when to use it, what it costs, what may go wrong."""
    context_window: Positive | None = None
    """Tokens that the model can take, for `when: {context: 0.7}`; whoever applies the policy may say it instead."""
    rules: tuple[Rule, ...]
    """Carried out in order, each on what the ones before it left. An empty list edits nothing."""
    when: When | None = None
    """When rules fire, unless they say it themselves, or forget: what must go goes at once."""
    keep: Keep = Keep()
    """What rules leave alone, unless they say it themselves, or forget."""

    _detectors: Mapping[str, Detector] = PrivateAttr(default_factory=dict)

    def when_of(self, rule: Rule) -> When | None:
        """Return what has to hold for a rule of this policy to fire."""
        return rule.when if rule.when is not None or rule.mode is Mode.FORGET else self.when

    def keep_of(self, rule: Rule) -> Keep:
        """Return what a rule of this policy leaves alone."""
        if rule.keep is not None:
            return rule.keep
        return Keep() if rule.mode is Mode.FORGET else self.keep

    def detector(self, rule: Rule) -> Detector | None:
        """Return the function that a rule selects by.

        Raises:
            PolicyError: it names one that nobody has allowed.
        """
        if rule.select.python is None:
            return None
        found = self._detectors.get(rule.select.python)
        if found is None:
            raise PolicyError(
                f"rule {rule.name!r} selects by {rule.select.python!r}, which is not allowed to run; load the policy "
                f"with allow_python=[{rule.select.python!r}]"
            )
        return found

    def with_detectors(self, detectors: Mapping[str, Detector]) -> Policy:
        """Return a copy whose rules may select by these functions, by the names that the rules call them by."""
        copied = self.model_copy()
        copied._detectors = dict(detectors)
        return copied

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

    def with_context_window(self, tokens: int) -> Policy:
        """Return a copy whose rules compare with a context window of so many tokens.

        Raises:
            PolicyError: `tokens` is no whole number above 0.
        """
        if type(tokens) is not int or tokens <= 0:
            raise PolicyError(f"got a context window of {tokens!r} tokens, expected a whole number above 0")
        return self.model_copy(update={"context_window": tokens})

    @model_validator(mode="after")
    def _unique_names(self) -> Policy:
        seen: Counter[str] = Counter()
        for idx, rule in enumerate(self.rules):
            if seen[rule.name]:
                raise mistake(f"got a second rule {rule.name!r}; give each a name of its own", "rules", idx, "name")
            seen[rule.name] += 1
        return self

    @model_validator(mode="after")
    def _rules_can_fire(self) -> Policy:
        for idx, rule in enumerate(self.rules):
            kept = self.keep_of(rule) if rule.keep is None else Keep()
            is_tag_kept = rule.select.tag is not None and covers(kept.tagged or (), rule.select.tag)
            if is_tag_kept or (rule.select.is_error and kept.errors):
                what, key = ("the tag", "tag") if is_tag_kept else ("errors", "is_error")
                raise mistake(
                    f"rule {rule.name!r} selects {what} that the policy keeps, so it can never fire; give the rule a "
                    "'keep' of its own",
                    *("rules", idx, "select", key),
                )
            when = self.when_of(rule)
            tokens, path = (0, ()) if when is None else tokens_needed(when)
            if self.context_window and tokens > self.context_window:
                raise mistake(
                    f"waits for {tokens} tokens and the context window has {self.context_window}, so rule "
                    f"{rule.name!r} can never fire",
                    *(("rules", idx) if rule.when is not None else ()),
                    *("when", *path),
                )
            for earlier in self.rules[:idx]:
                if self._takes_all(earlier, rule):
                    raise mistake(
                        f"can never fire: rule {earlier.name!r} before it drops all that it selects; put it first, or "
                        "let that one exclude something",
                        *("rules", idx, "name"),
                    )
        return self

    def _takes_all(self, earlier: Rule, later: Rule) -> bool:
        """Tell whether an earlier rule surely drops whatever a later one selects."""
        if earlier.drop is None or self.keep_of(earlier) != Keep():
            return False
        if self.when_of(earlier) not in (None, self.when_of(later)):
            return False
        first, second = _conditions(earlier.select), _conditions(later.select)
        if not set(second.pop("role")) <= set(first.pop("role")) or second.pop("opening") > first.pop("opening"):
            return False
        for key in ("tool", "id", "tag"):
            if key in first and key in second and covers(first[key], second[key]):
                del first[key]
        first.pop("older_than", None)
        return later.select.min_age >= earlier.select.min_age and all(
            second.get(key) == value for key, value in first.items()
        )


def _conditions(select: Select) -> dict[str, Any]:
    return {key: value for key, value in select.model_dump().items() if value is not None}


def _rule_with_turns(rule: Rule, turns: int) -> Rule:
    if rule.select.older_than is None:
        return rule
    select = rule.select.model_copy(update={"older_than": Age(turns=turns)})
    return rule.model_copy(update={"select": select})


def _check(template: str, known: Sequence[str], key: str) -> None:
    try:
        check_stub(template, known)
    except ValueError as error:
        raise mistake(str(error), key) from error
