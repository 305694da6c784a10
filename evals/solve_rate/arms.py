"""The arms of a run: policy × execution. The same three executions as a replay's, and `forget`.

- `none`: no policy, no note.
- `reprefill`: the policy, and the note taken off on the way: plain chat requests of the edited prompts.
- `splice`: the policy and the note.
- `forget`: as `splice`, with each rule in mode `forget`.
"""

from __future__ import annotations

from dataclasses import dataclass

from evals.solve_rate.config import ArmPolicy, Config
from evals.solve_rate.rows import Execution, SolveRateError
from leyline_agent.core.protocol import Mode
from leyline_agent.errors import PolicyError
from leyline_agent.policy import Policy, load_policy


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to treat the history."""

    name: str
    policy_name: str
    execution: Execution
    policy: Policy | None
    """What edits the history; None in the arm `none`."""


def make_arms(config: Config) -> tuple[Arm, ...]:
    """Return the arms of a config, `none` first.

    Raises:
        SolveRateError: a policy cannot be loaded.
    """
    arms = [Arm("none", "none", "none", None)] if "none" in config.executions else []
    for wanted in config.arm_policies:
        policy = _load(wanted)
        for execution in config.executions:
            if execution == "none":
                continue
            edited_by = forgetting(policy) if execution == "forget" else policy
            arms.append(Arm(f"{wanted.label}/{execution}", wanted.label, execution, edited_by))
    return tuple(arms)


def forgetting(policy: Policy) -> Policy:
    """Return the policy with each rule in mode `forget`, under the triggers and exceptions that it had."""
    # A rule that forgets heeds only its own `when` and `keep`, so what it had from the policy is given to it.
    rules = tuple(
        rule.model_copy(
            update={"mode": Mode.FORGET, "when": policy.when_of(rule), "keep": policy.keep_of(rule)},
        )
        for rule in policy.rules
    )
    return policy.model_copy(update={"rules": rules, "name": f"{policy.name or 'policy'} (forget)"})


def _load(wanted: ArmPolicy) -> Policy:
    try:
        policy = load_policy(wanted.policy)
        return policy if wanted.turns is None else policy.with_turns(wanted.turns)
    except PolicyError as error:
        raise SolveRateError(f"policies: {wanted.policy!r} cannot be used: {error}") from error
