"""A preview, and previews side by side, as text of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from leyline_agent.explain.preview import Preview, PreviewTurn
from leyline_agent.policy import Made, Policy, explain_policy

WIDTH = 100
MAX_DIRECTIVES = 256
"""Of one turn: the default of the server's LEYLINE_MAX_DIRECTIVES."""

_NAME_CHARS = 30
"""Of a policy, in a comparison."""

ACTIONS = {
    "replace": "replaced",
    "drop": "dropped",
    "collapse": "collapsed",
    "truncate": "cut",
    "clear_arguments": "cleared arguments in",
    "drop_reasoning": "dropped reasoning of",
    "redact": "redacted",
}

_COLUMNS = (
    "before: tokens of the prompt without the policy. after: with it. Of these, kept: a prefix cache has them. moved: "
    "a splice moves them. anew: to be prefilled, with splices, and without."
)


def preview_as_text(preview: Preview, *, directives: bool = False) -> str:
    """Return what each rule did and why, turn by turn, and what becomes of the cache."""
    lines = [prose(preview.policy), "", _wrapped(_heading(preview)), _wrapped(_COLUMNS), ""]
    lines.append(_row("turn", "messages", "before", "after", "kept", "moved", "anew", "anew without", "directives"))
    idle: dict[str, str] = {}
    for turn in preview.turns:
        lines.append(_turn_row(turn))
        lines += _details(turn, idle, directives=directives)
    lines += ["", *_summary(preview)]
    return "\n".join(lines)


def prose(policy: Policy) -> str:
    """Return what a policy does, in English."""
    return "\n".join(_wrapped(line) for line in explain_policy(policy).splitlines())


def comparison_as_text(previews: Sequence[Preview]) -> str:
    """Return a table of policies: what they edit, how long prompts are, what is computed."""
    first = previews[0]
    lines = [
        _wrapped(_heading(first)),
        _wrapped(
            "Sums over all requests. prompts: tokens of the edited prompts. last: of the last one alone. anew: to be "
            "prefilled, with splices, and without. hit: share of the prompts that is not prefilled, with splices."
        ),
        "",
        f"{'policy':{_NAME_CHARS}} {'edits':>6} {'in turns':>8} {'prompts':>10} {'last':>8} {'anew':>10} "
        f"{'without':>10} {'hit':>6}",
    ]
    for preview in previews:
        totals = preview.totals()
        hit = 1 - totals["recomputed_tokens"] / totals["tokens_after"] if totals["tokens_after"] else 0.0
        name = preview.policy_name
        # Of a path the end says which it is.
        name = name if len(name) <= _NAME_CHARS else f"…{name[1 - _NAME_CHARS :]}"
        lines.append(
            f"{name:{_NAME_CHARS}} {totals['edits']:>6,} {totals['turns_with_edits']:>8,} "
            f"{totals['tokens_after']:>10,} {totals['last_tokens_after']:>8,} {totals['recomputed_tokens']:>10,} "
            f"{totals['recomputed_tokens_without_splice']:>10,} {hit:>6.1%}"
        )
    return "\n".join(lines)


def how_counted(preview: Preview) -> str:
    """Say what the token numbers are worth."""
    if preview.is_exact:
        return (
            f"Tokens: exact, counted by {preview.counted}; those of single edits are estimates, which rules decide by."
        )
    return "Tokens: an estimate, by whole messages; --tokenizer PATH or --server URL count exactly."


def sentence(made: Made) -> str:
    """Say what a rule did, to what and why."""
    idxs = ", ".join(map(str, made.message_idxs))
    if len(made.message_idxs) > 6:
        idxs = f"{made.message_idxs[0]} to {made.message_idxs[-1]}"
    noun = "message" if len(made.message_idxs) == 1 else "messages"
    forget = ", to be forgotten" if made.mode == "forget" else ""
    return (
        f"{made.rule}: {ACTIONS[made.action]} {noun} {idxs} (about {made.tokens_before:,} -> {made.tokens_after:,} "
        f"tokens{forget}): {made.reason}"
    )


def _heading(preview: Preview) -> str:
    conversation = preview.conversation
    tools = f", {len(conversation.tools)} tools" if conversation.tools else ""
    return (
        f"{conversation.source}: {len(conversation.messages)} messages, {len(preview.turns)} requests{tools}. "
        f"{how_counted(preview)}"
    )


def _turn_row(turn: PreviewTurn) -> str:
    reuse = turn.reuse
    return _row(
        f"{turn.turn}",
        f"{len(turn.applied.original)}",
        f"{turn.tokens_before:,}",
        f"{reuse.prompt_tokens:,}",
        f"{reuse.kept_tokens:,}",
        f"{reuse.moved_tokens:,}",
        f"{reuse.recomputed_tokens:,}",
        f"{reuse.recomputed_tokens_without_splice:,}",
        f"{len(reuse.changes)}" if reuse.changes else "",
    )


def _row(*cells: str) -> str:
    widths = (4, 8, 9, 9, 9, 9, 9, 12, 10)
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def _details(turn: PreviewTurn, idle: dict[str, str], *, directives: bool) -> Iterator[str]:
    """Say what rules did, and, once for as long as it holds, why others did nothing."""
    for made in turn.applied.new:
        yield _wrapped(sentence(made), indent="     + ")
        idle.pop(made.rule, None)
    for rule in turn.applied.idle:
        if idle.get(rule.rule) != rule.why:
            yield _wrapped(f"{rule.rule}: nothing: {rule.detail}", indent="     - ")
            idle[rule.rule] = rule.why
    if turn.forget:
        yield _wrapped("forgets what was sent before: all from the first difference on is prefilled", indent="     ! ")
    if len(turn.reuse.changes) > MAX_DIRECTIVES:
        yield _wrapped(
            f"a server carries out the first {MAX_DIRECTIVES} of them unless LEYLINE_MAX_DIRECTIVES says more, and "
            "prefills what follows",
            indent="     ! ",
        )
    if turn.reuse.problem is not None:
        yield _wrapped(f"cannot be spliced: {turn.reuse.problem}", indent="     ! ")
    if directives:
        for change in turn.reuse.changes:
            yield (
                f"     > directive [{change.start:,}, {change.end:,}) -> {change.replacement_tokens:,} tokens, "
                f"{change.mode}"
            )


def _summary(preview: Preview) -> Iterator[str]:
    totals = preview.totals()
    kind = "exact" if preview.is_exact else "estimate"
    yield _wrapped(
        f"{totals['edits']:,} edits in {totals['turns_with_edits']:,} of {totals['turns']:,} turns. Prompts, in all "
        f"({kind}): {totals['tokens_before']:,} -> {totals['tokens_after']:,} tokens, the last one "
        f"{totals['last_tokens_before']:,} -> {totals['last_tokens_after']:,}. To be prefilled: "
        f"{totals['recomputed_tokens']:,} with splices, {totals['recomputed_tokens_without_splice']:,} without."
    )
    for rule in preview.policy.rules:
        mades = [made for turn in preview.turns for made in turn.applied.new if made.rule == rule.name]
        saved = sum(made.tokens_before - made.tokens_after for made in mades)
        yield _wrapped(f"{rule.name}: {len(mades):,} edits, about {saved:,} tokens less", indent="  ")


def _wrapped(text: str, *, indent: str = "") -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_on_hyphens=False,
    )
