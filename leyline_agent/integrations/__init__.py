"""Adapters to agent frameworks; import the one you need, each names the extra that it needs."""
