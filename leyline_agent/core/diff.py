"""Token diff: old ids and new ids to directives. (Contract; the body follows.)"""

from __future__ import annotations

from collections.abc import Sequence

from leyline_agent.core.protocol import Directive


def diff_token_ids(old_ids: Sequence[int], new_ids: Sequence[int], *, budget: int = 4_000_000) -> list[Directive]:
    raise NotImplementedError
