"""Counter-based random numbers: what a token draws depends on (seed, completion, position) and on nothing else.

The generator is Philox4x32-10 (Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011): a
keyed bijection of 128-bit counters that passes the usual test batteries. There is no state to carry, so a request
draws the same numbers alone, in a batch, after preemption and on any thread.

::

    key      = the completion's 64-bit seed
    counter  = (draw, 0, position low, position high)        numbers for the token at ``position``
    counter  = (index, 1, 0, 0), key = the request's seed    the seed of completion ``index``

The second counter word separates the two uses. A uniform number takes the first 53 of the output's bits, so it is a
multiple of 2**-53 in [0, 1). ``draw`` numbers further draws for the same token. The native sampler computes the
same bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_SEED_DOMAIN = 1


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """One application of Philox4x32-10: four 32-bit words in, four out."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _MASK32,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _MASK32,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def completion_seed(seed: int, index: int) -> int:
    """The 64-bit seed of completion ``index`` of a request; a negative ``seed`` counts modulo 2**64."""
    high, low, _, _ = philox4x32((index & _MASK32, _SEED_DOMAIN, 0, 0), (seed & _MASK32, (seed >> 32) & _MASK32))
    return high << 32 | low


def uniform(seed: int, position: int, draw: int = 0) -> float:
    """The ``draw``-th number in [0, 1) for the token at ``position`` of the completion with that seed."""
    counter = (draw & _MASK32, 0, position & _MASK32, (position >> 32) & _MASK32)
    high, low, _, _ = philox4x32(counter, (seed & _MASK32, (seed >> 32) & _MASK32))
    return float((high << 32 | low) >> 11) * 2.0**-53


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64], draw: int = 0) -> NDArray[np.float64]:
    """``uniform`` of each (seed, position); the arrays broadcast."""
    seeds, where = np.broadcast_arrays(seeds.astype(np.uint64), positions.astype(np.int64).view(np.uint64))
    mask, half = np.uint64(_MASK32), np.uint64(32)
    # 32-bit words held in 64-bit lanes, so that products are whole.
    k0, k1 = seeds & mask, seeds >> half
    c0, c1 = np.full(seeds.shape, draw & _MASK32, np.uint64), np.zeros(seeds.shape, np.uint64)
    c2, c3 = where & mask, where >> half
    for _ in range(_ROUNDS):
        product0, product1 = np.uint64(_MULTIPLIERS[0]) * c0, np.uint64(_MULTIPLIERS[1]) * c2
        c0, c1, c2, c3 = (
            (product1 >> half) ^ c1 ^ k0,
            product1 & mask,
            (product0 >> half) ^ c3 ^ k1,
            product0 & mask,
        )
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & mask, (k1 + np.uint64(_WEYL[1])) & mask
    bits: NDArray[np.uint64] = (c0 << half | c1) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
