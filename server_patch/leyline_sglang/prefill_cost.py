"""What prefill costs on this server, measured as it runs: so many milliseconds for so many tokens.

The scheduler times the forward pass of each prefill batch. A batch takes `floor_ms` whatever it computes (on a GPU the
launching of its kernels), or `fixed_ms + token_ms * tokens + pair_ms * pairs`, whichever is longer; a pair is a token
and one that it attends to. Right of a cached prefix a pair may cost more than without one, as attention kernels for
MLA differ there. Knows nothing of SGLang; `compat.around_prefill` feeds it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_OF_A_SIZE = 8
"""Batches remembered between two powers of two of tokens, so that an agent's many short turns do not push out what is
known of a long prompt."""
_SPREAD = 8
"""How many times the smallest batch the largest must be, before what is fixed can be told from what a token costs."""
_REACH = 32
"""How many times the most tokens, and the most pairs, of a batch can be asked about."""
_ABOVE = 1.25
"""A batch that took so many times the floor was held up by what it computed."""
_OUTLIER = 4.0
"""A batch that took so many times what the fit says is left out of it: it compiled a kernel, or was held up."""
_BETTER = 0.75
"""By what factor one more coefficient must lower the squared error to be in the fit: where batches are much alike,
tokens and pairs explain them equally well, and pairs would make a long prompt far too dear."""
_ROUNDING = 1e-12
_FIT_EVERY = 8
"""Batches between two fits, once there is a first one: a fit takes longer than a look-up."""

_MODELS = (
    ((0, 1, 0, 0),),
    ((1, 0, 0, 0), (0, 1, 0, 0)),
    ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 1)),
    ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)),
)
"""From simple to rich: which of batch, token, pair and pair beside something cached have coefficients, and which of
them the same."""

Batch = tuple[float, float, float, float]
"""Tokens; pairs, if nothing of the batch was cached (else 0); pairs, if something was (else 0); milliseconds."""


class Cost(NamedTuple):
    """A fit, in milliseconds of a batch, of a token and of a pair; and the most tokens and pairs that it holds for."""

    floor_ms: float
    fixed_ms: float
    token_ms: float
    pair_ms: float
    """Where nothing of the batch is cached."""
    cached_pair_ms: float
    """Where something is."""
    most_tokens: float
    most_pairs: float


def num_pairs(tokens: int, prefix_tokens: int) -> float:
    """Return how many earlier tokens, itself included, `tokens` attend to in all, right of a cached prefix."""
    return tokens * (prefix_tokens + (tokens + 1) / 2)


def predict_ms(cost: Cost, tokens: int, prefix_tokens: int) -> float | None:
    """Return what one request's prefill of `tokens` right of a cached prefix takes in a batch of its own.

    None where nothing of that size was measured.
    """
    if not tokens:
        return 0.0
    pairs = num_pairs(tokens, prefix_tokens)
    if tokens > cost.most_tokens or pairs > cost.most_pairs:
        return None
    pair_ms = cost.cached_pair_ms if prefix_tokens else cost.pair_ms
    return max(cost.floor_ms, cost.fixed_ms + cost.token_ms * tokens + pair_ms * pairs)


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
        self._batches: dict[int, deque[Batch]] = defaultdict(lambda: deque(maxlen=_OF_A_SIZE))
        """By the bits of the number of tokens."""
        self._since_fit = 0
        self._cost: Cost | None = None

    @property
    def cost(self) -> Cost | None:
        """The fit; None before batches of different sizes were seen."""
        return self._cost

    def observe(self, requests: Iterable[tuple[int, int]], ms: float) -> None:
        """Take note of one batch: (tokens, prefix tokens) of each of its requests, and what it took."""
        batch = batch_of(list(requests), ms)
        if not batch[0] or ms <= 0:
            return
        self._batches[int(batch[0]).bit_length()].append(batch)
        self._since_fit += 1
        cost = self._cost
        beyond = cost is None or batch[0] > cost.most_tokens or batch[1] + batch[2] > cost.most_pairs
        if beyond or self._since_fit >= _FIT_EVERY:
            self._cost, self._since_fit = fit([batch for size in self._batches.values() for batch in size]), 0


METER = PrefillMeter()
"""Of this process, which has one scheduler at most."""


def batch_of(requests: Sequence[tuple[int, int]], ms: float) -> Batch:
    """Add up the requests of a batch: (tokens, prefix tokens) of each."""
    tokens = sum(tokens for tokens, _ in requests)
    pairs = sum(num_pairs(*one) for one in requests)
    # One request with a prefix decides by which kernel attention is computed for all.
    return (tokens, 0.0, pairs, ms) if any(prefix for _, prefix in requests) else (tokens, pairs, 0.0, ms)


def fit(batches: Collection[Batch]) -> Cost | None:
    """Fit tokens, pairs and milliseconds of batches; no coefficient is negative. None where all are of one size.

    Errors count relative to what a batch took, so that a long prefill does not outweigh many short ones, and one that
    was held up counts no more than any other. What takes many times the fit is then left out of it.
    """
    rows = np.array(batches, dtype=np.float64).reshape(-1, 4)
    if not _tells_sizes_apart(rows):
        return None
    floor_ms = _floor_ms(rows)
    is_above = rows[:, 3] > _ABOVE * floor_ms
    if is_above.any():
        found, reach = _computed(rows, is_above, floor_ms), _REACH
    else:
        # All took as long: from where on longer ones would take longer is not known.
        found, reach = np.zeros(4), 1
    most_tokens, most_pairs = reach * rows[:, 0].max(), reach * rows[:, 1:3].max()
    fixed_ms, token_ms, pair_ms, cached_pair_ms = map(float, found)
    return Cost(floor_ms, fixed_ms, token_ms, pair_ms, cached_pair_ms, float(most_tokens), float(most_pairs))


def _tells_sizes_apart(rows: NDArray[np.float64]) -> bool:
    return len(rows) > 0 and bool(rows[:, 0].max() >= _SPREAD * rows[:, 0].min())


def _floor_ms(rows: NDArray[np.float64]) -> float:
    """Return what the quickest size of batch usually takes."""
    sizes = np.floor(np.log2(rows[:, 0]))
    return min(float(np.median(rows[sizes == size, 3])) for size in np.unique(sizes))


def _computed(rows: NDArray[np.float64], is_above: NDArray[np.bool_], floor_ms: float) -> NDArray[np.float64]:
    """Fit what is computed to the batches that took longer than the floor, and to those at the floor that object.

    What took no longer than the floor computed no longer either. Nothing else tells a batch that was held up.
    """
    used = is_above
    while True:
        found = _simplest(rows[used])
        said = found[0] + rows[:, :3] @ found[1:]
        objecting = ~used & (said > _ABOVE * floor_ms)
        if not objecting.any():
            break
        used = used | objecting
    usual = used & (rows[:, 3] <= _OUTLIER * np.maximum(floor_ms, said))
    return _simplest(rows[usual]) if usual.any() and (usual != used).any() else found


def _simplest(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return milliseconds of a batch, a token, a pair and a pair beside something cached, as few as will do."""
    columns = np.column_stack([np.ones(len(rows)), rows[:, :3]])
    found, error = np.zeros(4), np.inf
    for merged in _MODELS:
        # Coefficients that are to be alike are one of the sum of their columns.
        alike = np.array(merged, dtype=np.float64)
        coefficients, smaller = _least_squares(columns @ alike.T, rows[:, 3])
        # Below that it is rounding that is fitted.
        if smaller < _BETTER * error - _ROUNDING:
            found, error = coefficients @ alike, smaller
    return found


def _least_squares(features: NDArray[np.float64], ms: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Return the coefficients, none of them negative, and the squared error relative to `ms`."""
    features = features / ms[:, None]
    # Columns differ by orders of magnitude, and one may hold nothing.
    features /= (scale := np.maximum(np.linalg.norm(features, axis=0), np.finfo(np.float64).tiny))
    found = np.zeros(features.shape[1])
    used = list(range(features.shape[1]))
    while used:
        part = np.linalg.lstsq(features[:, used], np.ones(len(ms)), rcond=1e-6)[0]
        if (part >= 0).all():
            found[used] = part
            break
        # What it explains is left to the others.
        used = [idx for idx in used if idx != used[int(np.argmin(part))]]
    return found / scale, float(((features @ found - 1) ** 2).sum())
