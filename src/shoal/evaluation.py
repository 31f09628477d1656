"""What a precision costs in quality: perplexity, divergence and agreement against float32 on a text.

The text is cut into overlapping windows; in each, the tokens after a run-in are scored, so that every scored token has
context. Both paths see the same windows:

- perplexity: exp of the mean negative log-likelihood of the text's own next tokens;
- KL: mean over scored positions of KL(float32 || precision) over the whole vocabulary, in nats;
- top-1: how often both give the same most likely token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InvalidRequestError

WINDOW = 1024
RUN_IN = 256


class Scorer(Protocol):
    """Gives logits [len(token_ids), vocab] after each token of one text."""

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """One row per token."""
        ...


@dataclass(frozen=True, slots=True)
class Quality:
    """A precision against float32 on ``tokens`` scored tokens."""

    perplexity: float
    reference_perplexity: float
    kl: float
    top1: float
    tokens: int

    @property
    def change(self) -> float:
        """Relative change of perplexity: 0.005 is half a percent worse."""
        return self.perplexity / self.reference_perplexity - 1.0


def windows(token_ids: Sequence[int], window: int = WINDOW, run_in: int = RUN_IN) -> Iterator[Sequence[int]]:
    """Windows of ``window`` tokens of which all after the first ``run_in`` are scored, none twice.

    A text shorter than a window is one window; InvalidRequestError if not even one token could be scored.
    """
    if not 1 <= run_in < window:
        raise InvalidRequestError("window", f"must be longer than the run-in of {run_in} tokens, got {window}")
    if len(token_ids) <= run_in:
        raise InvalidRequestError("text", f"needs more than {run_in} tokens, has {len(token_ids)}")
    for start in range(0, max(1, len(token_ids) - run_in), window - run_in):
        yield token_ids[start : start + window]


def evaluate(
    precise: Scorer,
    scheme: Scorer,
    token_ids: Sequence[int],
    *,
    window: int = WINDOW,
    run_in: int = RUN_IN,
    max_windows: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Quality:
    """Score a text by both. ``precise`` is the float32 path; ``progress`` gets (windows done, windows in all)."""
    return evaluate_all(
        precise, [scheme], token_ids, window=window, run_in=run_in, max_windows=max_windows, progress=progress
    )[0]


def evaluate_all(
    precise: Scorer,
    schemes: Sequence[Scorer],
    token_ids: Sequence[int],
    *,
    window: int = WINDOW,
    run_in: int = RUN_IN,
    max_windows: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Quality]:
    """Score a text by several, all against one run of ``precise``; in the order of ``schemes``."""
    pieces = list(windows(token_ids, window, run_in))[:max_windows]
    precise_loss, count = 0.0, 0
    sums = [_Sums() for _ in schemes]
    for done, piece in enumerate(pieces):
        # Logits at position i predict token i + 1.
        rows = slice(run_in - 1, len(piece) - 1)
        targets = np.array(piece[run_in:], dtype=np.intp)
        wanted = _log_softmax(precise.logits(piece)[rows])
        probable = np.exp(wanted)
        best = wanted.argmax(axis=1)
        index = np.arange(len(targets))
        precise_loss -= float(wanted[index, targets].sum(dtype=np.float64))
        count += len(targets)
        for scheme, total in zip(schemes, sums, strict=True):
            found = _log_softmax(scheme.logits(piece)[rows])
            total.loss -= float(found[index, targets].sum(dtype=np.float64))
            total.divergence += float((probable * (wanted - found)).sum(dtype=np.float64))
            total.agree += int((best == found.argmax(axis=1)).sum())
        progress(done + 1, len(pieces))
    return [
        Quality(
            perplexity=math.exp(total.loss / count),
            reference_perplexity=math.exp(precise_loss / count),
            kl=total.divergence / count,
            top1=total.agree / count,
            tokens=count,
        )
        for total in sums
    ]


@dataclass(slots=True)
class _Sums:
    loss: float = 0.0
    divergence: float = 0.0
    agree: int = 0


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    result: NDArray[np.float32] = shifted - np.log(total).astype(np.float32)
    return result
