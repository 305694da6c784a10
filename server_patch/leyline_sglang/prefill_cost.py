"""What prefill costs on this server, measured as it runs: so many milliseconds for so many tokens.

The scheduler times the forward pass of each prefill batch and fits `fixed + per_token * tokens + per_pair * pairs`, a
pair being a token and one that it attends to. Knows nothing of SGLang; `compat.around_prefill` feeds it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

_OF_A_SIZE = 8
"""Batches remembered between two powers of two of tokens, so that an agent's many short turns do not push out what is
known of a long prompt."""
_SPREAD = 8
"""How many times the smallest batch the largest must be, before what is fixed can be told from what a token costs."""
_REACH = 32
"""How many times the most tokens, and the most pairs, of a batch can be asked about."""
_OUTLIER = 4.0
"""A batch that took so many times what the fit says is left out of it: it compiled a kernel, or was held up."""
_BETTER = 0.75
"""By what factor pairs must lower the squared error to be in the fit: where batches are much alike, tokens and pairs
explain them equally well, and pairs would make a long prompt far too dear."""
_FIT_EVERY = 8
"""Batches between two fits, once there is a first one: a fit takes longer than a look-up."""

Cost = tuple[float, float, float, float, float]
"""Milliseconds of a batch, of a token and of a pair of tokens; and the most tokens and pairs that these hold for."""


def num_pairs(tokens: int, prefix_tokens: int) -> float:
    """Return how many earlier tokens, itself included, `tokens` attend to in all, right of a cached prefix."""
    return tokens * (prefix_tokens + (tokens + 1) / 2)


def predict_ms(cost: Cost, tokens: int, prefix_tokens: int) -> float | None:
    """Return what one request's prefill of `tokens` right of a cached prefix takes in a batch of its own.

    None where nothing of that size was measured.
    """
    fixed_ms, token_ms, pair_ms, most_tokens, most_pairs = cost
    pairs = num_pairs(tokens, prefix_tokens)
    if tokens > most_tokens or pairs > most_pairs:
        return None
    return fixed_ms + token_ms * tokens + pair_ms * pairs if tokens else 0.0


def saved_by_moving(
    cost: Cost | None, *, prompt_tokens: int, kept_tokens: int, moved_tokens: int, prefilled_tokens: int, ms: float
) -> float | None:
    """Return how many milliseconds sooner a request is answered as rows were moved; None where that is not known.

    Args:
        cost: what prefill costs.
        prompt_tokens: all of the request's.
        kept_tokens: what was cached of it and needed no splice.
        moved_tokens: what was moved.
        prefilled_tokens: what the splice prefilled before the request.
        ms: what the splice took, that prefill included.
    """
    if not moved_tokens or cost is None:
        return None
    left = prompt_tokens - kept_tokens
    still = left - moved_tokens - prefilled_tokens
    without_ms, still_ms = predict_ms(cost, left, kept_tokens), predict_ms(cost, still, prompt_tokens - still)
    return None if without_ms is None or still_ms is None else round(without_ms - still_ms - ms, 3)


class PrefillMeter:
    """The last prefill batches of one scheduler, and the fit to them."""

    def __init__(self) -> None:
        self._batches: dict[int, deque[tuple[float, float, float]]] = defaultdict(lambda: deque(maxlen=_OF_A_SIZE))
        """Tokens, pairs, milliseconds; by the bits of the number of tokens."""
        self._since_fit = 0
        self._cost: Cost | None = None

    @property
    def cost(self) -> Cost | None:
        """The fit; None before batches of different sizes were seen."""
        return self._cost

    def observe(self, requests: Iterable[tuple[int, int]], ms: float) -> None:
        """Take note of one batch: (tokens, prefix tokens) of each of its requests, and what it took."""
        lengths = list(requests)
        tokens = sum(tokens for tokens, _ in lengths)
        if not tokens or ms <= 0:
            return
        self._batches[tokens.bit_length()].append((tokens, sum(num_pairs(*one) for one in lengths), ms))
        self._since_fit += 1
        if self._cost is None or self._since_fit >= _FIT_EVERY:
            self._cost, self._since_fit = fit([batch for size in self._batches.values() for batch in size]), 0


METER = PrefillMeter()
"""Of this process, which has one scheduler at most."""


def fit(batches: Collection[tuple[float, float, float]]) -> Cost | None:
    """Fit tokens, pairs and milliseconds of batches; no coefficient is negative. None where all are of one size.

    Errors count relative to what a batch took, so that a long prefill does not outweigh many short ones, and one that
    was held up counts no more than any other. What takes many times the fit is then left out of it.
    """
    rows = np.array(batches, dtype=np.float64).reshape(-1, 3)
    if not _tells_sizes_apart(rows):
        return None
    cost = _simplest(rows)
    usual = rows[rows[:, 2] <= _OUTLIER * (cost[0] + rows[:, :2] @ cost[1:])]
    if len(usual) < len(rows) and _tells_sizes_apart(usual):
        cost = _simplest(usual)
    most_tokens, most_pairs = _REACH * rows[:, :2].max(axis=0)
    return float(cost[0]), float(cost[1]), float(cost[2]), float(most_tokens), float(most_pairs)


def _tells_sizes_apart(rows: NDArray[np.float64]) -> bool:
    return len(rows) > 0 and bool(rows[:, 0].max() >= _SPREAD * rows[:, 0].min())


def _simplest(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    without_pairs, error = _least_squares(rows, [0, 1])
    cost, smaller = _least_squares(rows, [0, 1, 2])
    return cost if smaller < _BETTER * error else without_pairs


def _least_squares(rows: NDArray[np.float64], used: list[int]) -> tuple[NDArray[np.float64], float]:
    """Return the coefficients, none of them negative, and the squared error."""
    features = np.column_stack([np.ones(len(rows)), rows[:, :2]]) / rows[:, 2:]
    # Columns differ by orders of magnitude.
    features /= (scale := np.linalg.norm(features, axis=0))
    found = np.zeros(3)
    while used:
        part = np.linalg.lstsq(features[:, used], np.ones(len(rows)), rcond=1e-6)[0]
        if (part >= 0).all():
            found[used] = part
            break
        # What it explains is left to the others.
        used = [idx for idx in used if idx != used[int(np.argmin(part))]]
    return found / scale, float(((features @ found - 1) ** 2).sum())
