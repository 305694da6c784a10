"""Policies: what to edit in an agent's history, in YAML."""

from leyline_agent.policy.engine import policy_edits
from leyline_agent.policy.loader import load_policy, parse_policy, shipped_policies
from leyline_agent.policy.prose import explain_policy
from leyline_agent.policy.schema import Age, Keep, Policy, Rule, Select

__all__ = [
    "Age",
    "Keep",
    "Policy",
    "Rule",
    "Select",
    "explain_policy",
    "load_policy",
    "parse_policy",
    "policy_edits",
    "shipped_policies",
]
