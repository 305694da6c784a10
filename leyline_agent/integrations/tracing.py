"""A turn's attributes, given to whatever traces the run that makes it.

Answers and state stay as they are: what LangSmith shows as a run's metadata, OpenTelemetry as a span's attributes and
callback handlers as the custom event `leyline` is told beside them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from langchain_core.runnables import RunnableConfig, ensure_config
from langchain_core.runnables.config import get_async_callback_manager_for_config, get_callback_manager_for_config
from langsmith import get_current_run_tree

from leyline_agent.telemetry import Attribute

EVENT = "leyline"
"""Name of the custom event."""


def tell(attributes: Mapping[str, Attribute], config: RunnableConfig | None = None) -> None:
    """Tell the run around this call, its span and its callback handlers; without a run, the span alone."""
    _mark(attributes)
    callbacks = get_callback_manager_for_config(ensure_config(config))
    if callbacks.parent_run_id is not None:
        callbacks.on_custom_event(EVENT, dict(attributes), run_id=callbacks.parent_run_id)


async def tell_async(attributes: Mapping[str, Attribute], config: RunnableConfig | None = None) -> None:
    """As `tell`."""
    _mark(attributes)
    callbacks = get_async_callback_manager_for_config(ensure_config(config))
    if callbacks.parent_run_id is not None:
        await callbacks.on_custom_event(EVENT, dict(attributes), run_id=callbacks.parent_run_id)


def _mark(attributes: Mapping[str, Attribute]) -> None:
    if run := get_current_run_tree():
        run.add_metadata(dict(attributes))
    # Who has not imported it has no span either.
    if trace := sys.modules.get("opentelemetry.trace"):
        trace.get_current_span().set_attributes(dict(attributes))
