"""Plan entries and batches for the sampling tests, and the rule that says which native tokens agree with the twin."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shoal.core.params import SamplingParams
from shoal.core.plan import StepEntry
from shoal.core.request import Request
from shoal.sampling.batch import SamplingBatch, pack
from shoal.sampling.reference import adjust, distribution, ranking
from shoal.sampling.rng import uniform

EPSILON = 1e-6


def entry(
    params: SamplingParams,
    *,
    seq_id: int = 0,
    index: int = 0,
    seed: int = 0,
    position: int = 10,
    prompt: tuple[int, ...] = (0,),
    generated: tuple[int, ...] = (),
    num_generated: int | None = None,
    stop_ids: frozenset[int] = frozenset(),
    samples: bool = True,
) -> StepEntry:
    """A decode entry whose token will stand at ``position``."""
    request = Request(
        request_id=f"r{seq_id}", prompt_ids=prompt, params=params, max_tokens=100, stop_ids=stop_ids, seed=seed
    )
    return StepEntry(
        seq_id=seq_id,
        request=request,
        index=index,
        start=position - 1,
        token_ids=(0,),
        block_table=(0,),
        samples=samples,
        num_generated=len(generated) if num_generated is None else num_generated,
        history=prompt + generated if params.penalized else (),
    )


def repeated(params: SamplingParams, count: int, seed: int = 0) -> SamplingBatch:
    """The same row at ``count`` successive positions."""
    batch = pack([entry(params, seed=seed)])
    rows = np.repeat(batch.rows, count)
    rows["position"] = np.arange(count)
    return replace(batch, rows=rows)


def agreeing_tokens(logits: NDArray[np.float32], batch: SamplingBatch, row: int) -> set[int]:
    """Tokens that a float32 sampler may choose for a row of temperature > 0.

    Top-k, top-p and min-p all keep some number m of best-ranked tokens. Ranks are exact, so top-k's m is. Let m- and m+
    be what top-p and min-p keep in float64 when both limits are made EPSILON (relative) stricter and laxer. A token
    agrees if for some m in [m-, m+] its interval of the cumulative distribution over the m best, in order of id,
    meets [u - EPSILON, u + EPSILON]. Away from boundaries that is the twin's token alone.
    """
    params = batch.rows[row]
    adjusted = adjust(logits, batch, row)
    top_k, top_p, min_p = int(params["top_k"]), float(params["top_p"]), float(params["min_p"])

    def weights(slack: float) -> NDArray[np.float64]:
        return distribution(
            adjusted,
            temperature=float(params["temperature"]),
            top_k=top_k,
            top_p=top_p * (1 + slack) if top_p < 1 else 1.0,
            min_p=min_p * (1 - slack),
        )

    u = uniform(int(params["seed"]), int(params["position"]))
    order = ranking(adjusted)
    lax = weights(EPSILON)
    fewest, most = int((weights(-EPSILON) > 0).sum()), int((lax > 0).sum())
    agreeing: set[int] = set()
    for kept in range(max(fewest, 1), most + 1):
        part = np.zeros_like(lax)
        part[order[:kept]] = lax[order[:kept]]
        running = np.cumsum(part) / part.sum()
        meets = (running >= u - EPSILON) & (running - part / part.sum() <= u + EPSILON) & (part > 0)
        agreeing.update(np.flatnonzero(meets).tolist())
    return agreeing
