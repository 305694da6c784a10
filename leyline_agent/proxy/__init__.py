"""The proxy: an OpenAI-compatible server before another one, which edits the histories that pass through it."""

from leyline_agent.proxy.settings import ProxySettings

__all__ = ["ProxySettings"]
