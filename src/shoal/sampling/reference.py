"""The sampler in plain NumPy: the specification that the native one is tested against.

The order is fixed (docs/decisions/0006-sampling.md gives the reasons):

1. log-probabilities are those of the raw logits; a row whose token is given has nothing else;
2. penalties: repetition over prompt and output, then presence and frequency over the output;
3. bias, then bans, then the mask of what a grammar allows;
4. temperature 0 or top-k 1: the best token; otherwise divide by the temperature and
5. keep the top-k; over what is left, keep the top-p nucleus *and* what min-p keeps;
6. inverse CDF in order of token id, with one uniform number.

"Better" is always: larger logit, then lower id. Logits are adjusted in float32, as the model made them, so ranks are
exact; probabilities are float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.sampling.batch import SamplingBatch
from shoal.sampling.results import SampledRows, SampleStatus
from shoal.sampling.rng import uniform

_FLOAT_MAX = np.finfo(np.float32).max


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's outcome; ``logprob`` and ``top`` as far as they were asked for."""

    token: int
    status: SampleStatus
    logprob: float = float("nan")
    top: tuple[tuple[int, float], ...] = ()


def sample_rows(logits: NDArray[np.float32], batch: SamplingBatch) -> SampledRows:
    """``sample`` of each row: logits [rows, vocab]."""
    rows = SampledRows.empty(batch)
    for row in range(len(batch.rows)):
        one = sample(logits[row], batch, row)
        rows.results[row] = (one.token, int(one.status), one.logprob, len(one.top))
        for place, (token, logprob) in enumerate(one.top):
            rows.top_ids[row, place] = token
            rows.top_logprobs[row, place] = logprob
    return rows


def sample(logits: NDArray[np.float32], batch: SamplingBatch, row: int) -> Sampled:
    """Choose a token for row ``row`` of ``batch`` from its logits [vocab]."""
    params = batch.rows[row]
    if np.isnan(logits).any() or np.isposinf(logits).any():
        return Sampled(-1, SampleStatus.NOT_FINITE)
    if np.isneginf(logits).all():
        return Sampled(-1, SampleStatus.NO_CANDIDATE)
    top, logprobs = top_logprobs(logits, int(params["num_logprobs"]))
    if (given := int(params["given"])) >= 0:
        if given >= len(logits):
            return Sampled(-1, SampleStatus.BAD_ID, top=top)
        return Sampled(given, SampleStatus.OK, max(float(logprobs[given]), -float(_FLOAT_MAX)), top)
    if ids_outside(batch, row, len(logits)):
        return Sampled(-1, SampleStatus.BAD_ID, top=top)
    adjusted = adjust(logits, batch, row)
    if np.isneginf(adjusted).all():
        return Sampled(-1, SampleStatus.NO_CANDIDATE, top=top)
    if params["temperature"] == 0 or params["top_k"] == 1:
        token = int(np.argmax(adjusted))
    else:
        weights = distribution(
            adjusted,
            temperature=float(params["temperature"]),
            top_k=int(params["top_k"]),
            top_p=float(params["top_p"]),
            min_p=float(params["min_p"]),
        )
        token = inverse_cdf(weights, uniform(int(params["seed"]), int(params["position"])))
    logprob = float(logprobs[token]) if params["num_logprobs"] >= 0 else float("nan")
    return Sampled(token, SampleStatus.OK, logprob, top)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities of the model's own distribution: finite in float32 unless the logit is -inf."""
    shifted = logits.astype(np.float64) - float(logits.max())
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return np.where(np.isneginf(logits), result, np.maximum(result, -float(_FLOAT_MAX)))


def top_logprobs(logits: NDArray[np.float32], count: int) -> tuple[tuple[tuple[int, float], ...], NDArray[np.float64]]:
    """The ``count`` most likely possible tokens with their log-probabilities, best first; and everybody's."""
    logprobs = log_softmax(logits)
    best = [int(token) for token in ranking(logits)[: max(count, 0)] if logits[token] > -np.inf]
    return tuple((token, float(logprobs[token])) for token in best), logprobs


def ranking(logits: NDArray[np.float32]) -> NDArray[np.intp]:
    """Token ids, best first: larger logit, then lower id."""
    return np.argsort(-logits, kind="stable")


def ids_outside(batch: SamplingBatch, row: int, vocab: int) -> bool:
    """Whether the row names a token that the vocabulary lacks."""
    ids = np.concatenate([_part(batch, row, "bias"), _part(batch, row, "banned"), _part(batch, row, "history")])
    return bool(((ids < 0) | (ids >= vocab)).any())


def adjust(logits: NDArray[np.float32], batch: SamplingBatch, row: int) -> NDArray[np.float32]:
    """Logits after penalties, bias, bans and mask. What is impossible stays so; nothing overflows to infinity."""
    params = batch.rows[row]
    adjusted = logits.astype(np.float32)
    history, num_prompt = _part(batch, row, "history"), int(params["num_prompt"])
    generated, counts = np.unique(history[num_prompt:], return_counts=True)
    with np.errstate(over="ignore"):
        seen = np.unique(history)
        values = adjusted[seen]
        adjusted[seen] = np.where(values > 0, values / params["repetition"], values * params["repetition"])
        adjusted[generated] -= params["presence"]
        adjusted[generated] -= params["frequency"] * counts.astype(np.float32)
        possible = logits > -np.inf
        adjusted[possible] = np.clip(adjusted[possible], -_FLOAT_MAX, _FLOAT_MAX)
        start, stop = int(params["bias_start"]), int(params["bias_start"] + params["bias_count"])
        adjusted[batch.bias_ids[start:stop]] += batch.bias_values[start:stop]
        adjusted[possible] = np.clip(adjusted[possible], -_FLOAT_MAX, _FLOAT_MAX)
    adjusted[_part(batch, row, "banned")] = -np.inf
    if params["mask"]:
        adjusted[~allowed(batch.masks[params["mask"] - 1], len(adjusted))] = -np.inf
    return adjusted


def allowed(mask: NDArray[np.uint32], vocab: int) -> NDArray[np.bool_]:
    """A packed mask as one truth value per token."""
    bits = np.unpackbits(mask.astype("<u4").view(np.uint8), count=vocab, bitorder="little")
    return bits.astype(np.bool_)


def distribution(
    adjusted: NDArray[np.float32], *, temperature: float, top_k: int, top_p: float, min_p: float
) -> NDArray[np.float64]:
    """Unnormalised probabilities, the best token's being 1 and those of truncated tokens 0."""
    # The subtraction is float32's, so that a gap between neighbours is the same here and in native code.
    with np.errstate(over="ignore"):
        gaps = (adjusted - adjusted.max()).astype(np.float64) / temperature
    weights = np.exp(np.maximum(gaps, -800.0))
    weights[gaps < -87.0] = 0.0
    order = ranking(adjusted)
    if top_k > 0:
        weights[order[top_k:]] = 0.0
    kept = np.ones(len(weights), np.bool_)
    if top_p < 1.0:
        reached = np.cumsum(weights[order])
        # A token stays while those better than it fall short of top_p.
        kept[order[1:]] = reached[:-1] < top_p * reached[-1]
    kept &= weights >= min_p
    return np.where(kept, weights, 0.0)


def inverse_cdf(weights: NDArray[np.float64], u: float) -> int:
    """The first id at which the running sum exceeds ``u`` of the total."""
    running = np.cumsum(weights)
    token = int(np.searchsorted(running, u * running[-1], side="right"))
    # Rounding may carry u * total to the total itself: then the last possible token.
    return min(token, int(np.flatnonzero(weights)[-1]))


def _part(batch: SamplingBatch, row: int, name: str) -> NDArray[np.int32]:
    flat = {"bias": batch.bias_ids, "banned": batch.banned_ids, "history": batch.history}[name]
    start = int(batch.rows[row][f"{name}_start"])
    return flat[start : start + int(batch.rows[row][f"{name}_count"])]
