"""What a noted request must be like to be followed, or to be served at all."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from leyline_agent.core.protocol import Reason
from leyline_agent.errors import PlanError
from leyline_sglang.namespaces import is_own_salt

_MAX_KEY = 1024
"""Characters of a caller's extra_key or cache_salt: both are kept for each conversation."""


def num_choices(obj: Any) -> int:
    """Return how many answers a request asks for."""
    return int((obj.sampling_params or {}).get("n") or 1)


def check_request(obj: Any) -> None:
    """Refuse what has no single list of token ids that alone decides its KV."""
    problem = None
    if not isinstance(obj.input_ids, list) or not obj.input_ids or not isinstance(obj.input_ids[0], int):
        problem = "needs one list of token ids (no text, no batch)"
    elif obj.image_data or obj.video_data or obj.audio_data:
        problem = "multimodal input"
    elif obj.session_params:
        problem = "session_params"
    elif obj.positional_embed_overrides is not None:
        problem = "embedding overrides"
    elif obj.return_logprob and obj.logprob_start_len is not None and obj.logprob_start_len >= 0:
        problem = "log probabilities of the prompt, for which it is prefilled again whatever is cached"
    if problem:
        raise PlanError(f"this request cannot be spliced: {problem}", reason=Reason.UNSUPPORTED_REQUEST)


def checked_ids(token_ids: Sequence[int], vocab_size: int) -> array[int]:
    """Return the ids as they are remembered, int32.

    Raises:
        PlanError: one is no token of the model, or no integer.
    """
    try:
        packed = array("i", token_ids)
        view = np.frombuffer(packed, dtype=np.int32)
        wrong = view.min() < 0 or view.max() >= vocab_size
    except TypeError as error:
        raise PlanError(f"token ids must be integers: {error}", reason=Reason.UNSUPPORTED_REQUEST) from error
    except OverflowError:
        wrong = True
    if wrong:
        raise PlanError(
            f"token ids must lie in [0, {vocab_size}), got {min(token_ids)} to {max(token_ids)}",
            reason=Reason.TOKEN_OUT_OF_VOCABULARY,
        )
    return packed


def check_namespace(extra_key: Any, cache_salt: Any) -> None:
    """Refuse a caller who names one of the namespaces that only the server derives, or one that is too long to keep."""
    for key in (extra_key, cache_salt):
        for text in key if isinstance(key, list) else [key]:
            if text is not None and len(text) > _MAX_KEY:
                raise PlanError(
                    f"extra_key and cache_salt may have {_MAX_KEY} characters beside a note, got {len(text)}",
                    reason=Reason.UNSUPPORTED_REQUEST,
                )
    try:
        check_no_own_salt(cache_salt)
    except ValueError as error:
        raise PlanError(str(error), reason=Reason.BAD_NOTE) from error


def check_no_own_salt(cache_salt: Any) -> None:
    """Answer 400 to a caller who names one of the namespaces that only the server derives."""
    for salt in cache_salt if isinstance(cache_salt, list) else [cache_salt]:
        if isinstance(salt, str) and is_own_salt(salt):
            raise ValueError("cache_salt: values that begin with 'leyline-' are the server's own; choose another")


def check_vocabulary(input_ids: Any, vocab_size: int) -> None:
    """Answer 400 to ids outside the vocabulary, which kill a stock server when they reach a prefill."""
    if isinstance(input_ids, list) and input_ids and isinstance(input_ids[0], int):
        try:
            checked_ids(input_ids, vocab_size)
        except PlanError as error:
            raise ValueError(str(error)) from error
