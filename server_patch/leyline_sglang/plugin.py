"""Entry point of the SGLang plugin: `activate` runs in every process of the server, before the engine starts.

SGLang logs what a plugin raises and goes on without it, so what was installed, or why not, is told at
`GET /leyline/capabilities`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from leyline_agent.errors import LeylineError
from leyline_sglang import compat
from leyline_sglang.config import load_config

logger = logging.getLogger(__name__)


def activate() -> None:
    """Install the hooks that this process needs."""
    version = compat.sglang_version()
    if version not in compat.SUPPORTED_VERSIONS:
        _fail(f"SGLang {version} is not supported; this release was tested with {compat.SUPPORTED_VERSIONS}")
        return
    try:
        config = load_config()
    except LeylineError as error:
        _fail(str(error))
        return

    from leyline_sglang import one_step, splice
    from leyline_sglang.footprints import forget_footprints
    from leyline_sglang.io_types import AdmissionReply, AdmissionRequest, CacheReply, CacheRequest
    from leyline_sglang.prefill_cost import METER

    compat.register_messages(CacheRequest, CacheReply, AdmissionRequest, AdmissionReply)
    compat.at_scheduler_start(splice.warm_up)
    compat.handle_in_scheduler(CacheRequest, splice.handle)
    compat.handle_in_scheduler(AdmissionRequest, one_step.announce)
    compat.around_admission(one_step.admit)
    compat.after_insertion(splice.record_insertion)
    compat.after_batch(splice.drop_what_was_held)
    compat.around_prefill(METER.observe)
    compat.after_reset(forget_footprints)
    if not compat.in_http_process():
        return

    from leyline_sglang.noted_request import generate
    from leyline_sglang.routes import add_routes, put_outcome_in_metadata
    from leyline_sglang.sequences import SequenceMemory
    from leyline_sglang.serving import Serving

    memory = SequenceMemory(
        turns_per_conversation=config.turns_per_conversation,
        conversation_memory_tokens=config.conversation_memory_tokens,
        memory_tokens=config.memory_tokens,
        scope_memory_tokens=config.scope_memory_tokens,
        max_conversations=config.max_conversations,
    )
    serving = Serving(config, memory)
    targets: dict[str, Callable[..., Any]] = {
        compat.TOKENIZER_MANAGER + "generate_request": partial(generate, serving),
        compat.TOKENIZER_MANAGER + "abort_request": serving.abort,
        **{compat.TOKENIZER_MANAGER + name: serving.reset for name in compat.CACHE_RESETS},
    }
    for target, hook in targets.items():
        compat.around(target, hook)
    compat.after_chat_response(put_outcome_in_metadata)
    add_routes(compat.http_app(), serving, sorted(target.rsplit(".", 1)[-1] for target in targets))


def _fail(problem: str) -> None:
    logger.error("leyline: nothing installed: %s", problem)
    if compat.in_http_process():
        from leyline_sglang.capabilities import add_failure

        add_failure(compat.http_app(), problem)
