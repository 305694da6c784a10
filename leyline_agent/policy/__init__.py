"""Policies: what to edit in an agent's history, in YAML."""

from leyline_agent.policy.conditions import Keep, When
from leyline_agent.policy.counting import EstimatedTokens, TextTokens, TokenCounter
from leyline_agent.policy.engine import PolicyRun, apply_policy, policy_edits, request_points
from leyline_agent.policy.library import LibraryEntry, policy_library, shipped_policies
from leyline_agent.policy.loader import load_policy, parse_policy
from leyline_agent.policy.prose import explain_policy
from leyline_agent.policy.report import Applied, Idle, Made
from leyline_agent.policy.schema import Policy, Rule
from leyline_agent.policy.selecting import Age, Select

__all__ = [
    "Age",
    "Applied",
    "EstimatedTokens",
    "Idle",
    "Keep",
    "LibraryEntry",
    "Made",
    "Policy",
    "PolicyRun",
    "Rule",
    "Select",
    "TextTokens",
    "TokenCounter",
    "When",
    "apply_policy",
    "explain_policy",
    "load_policy",
    "parse_policy",
    "policy_edits",
    "policy_library",
    "request_points",
    "shipped_policies",
]
