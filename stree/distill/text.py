"""Token streams that a drafter is trained on, what is held out of them, and the windows drawn from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Batches", "Corpus", "check_length", "distinct", "encode", "hold_out", "pack"]

HELD_OUT_SHARE = 0.05
HELD_OUT_WINDOWS = 32  # at most
AT_ONCE = 64  # texts that are tokenised together


@dataclass(frozen=True, slots=True)
class Corpus:
    """What to train on.

    Attributes:
        streams: kind -> int32[total] tokens, documents one after another.
        shares: kind -> its share of the windows, in any unit.
        passes: kind -> passes after which it is left out; without an entry, no limit.
        separator: the token after every document, or None where there is none.
    """

    streams: Mapping[str, np.ndarray]
    shares: Mapping[str, float]
    passes: Mapping[str, float] = field(default_factory=dict)
    separator: int | None = None


def pack(documents: Iterable[Sequence[int] | np.ndarray], separator: int | None) -> np.ndarray:
    """Join token lists into one stream, the separator after each: int32[total]."""
    end = np.asarray([] if separator is None else [separator], dtype=np.int32)
    parts = [np.zeros(0, dtype=np.int32)]
    for document in documents:
        parts += np.asarray(document, dtype=np.int32), end
    return np.concatenate(parts)


def distinct(texts: Iterable[str]) -> list[str]:
    """Leave out texts that are given again, white space around them not counted: what is held out must be new."""
    return list({text.strip(): text for text in reversed(list(texts))}.values())[::-1]


def encode(texts: Sequence[str], tokenizer: Any, vocab_size: int, separator: int | None) -> np.ndarray:
    """Tokenise texts into one stream.

    Args:
        texts: documents.
        tokenizer: the target's, of transformers.
        vocab_size: logits of the target.
        separator: put after every text that does not end with it.

    Raises:
        ValueError: no text, or a token for which the target has no logit.
    """
    documents: list[np.ndarray] = []  # lists of integers take several times the memory
    for start in range(0, len(texts), AT_ONCE):
        tokens = tokenizer(list(texts[start : start + AT_ONCE]), verbose=False)["input_ids"]
        documents += [np.asarray(document, dtype=np.int32) for document in tokens]
    ended = [document[:-1] if document.size and document[-1] == separator else document for document in documents]
    stream = pack([document for document in ended if document.size], separator)
    if not stream.size or (separator is not None and not (stream != separator).any()):
        raise ValueError("there is no text to train on")
    if int(stream.max()) >= vocab_size:
        raise ValueError(
            f"the tokenizer gives token {int(stream.max())}, but the target has {vocab_size} logits; "
            "name the target's own tokenizer"
        )
    return stream


def check_length(texts: Iterable[str], tokenizer: Any, length: int) -> None:
    """Refuse texts that have too few tokens; no more of them are tokenised than are needed.

    Raises:
        ValueError: less text than two windows.
    """
    count = 0
    for text in texts:
        count += len(tokenizer(text, verbose=False)["input_ids"])
        if count >= 2 * (length + 1):
            return
    _check_enough(count, length)


def _check_enough(count: int, length: int) -> None:
    """Refuse fewer tokens than two windows."""
    if count < 2 * (length + 1):
        raise ValueError(
            f"the text has {count} tokens; training on windows of {length} needs at least {2 * (length + 1)}: "
            "give more text or a smaller length"
        )


def hold_out(stream: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut the end off a stream, to measure on: 5 %, at least one window and at most 32.

    Returns:
        The rest, and what is held out.

    Raises:
        ValueError: less text than two windows.
    """
    _check_enough(len(stream), length)
    window = length + 1
    size = min(max(int(HELD_OUT_SHARE * len(stream)), window), HELD_OUT_WINDOWS * window)
    return stream[:-size], stream[-size:]


class Batches:
    """Draws windows by the shares of the kinds; in every pass over a stream each window once, in a fresh random order.

    What is drawn depends on the seed and on what was drawn before only, so that a run goes on from ``state``.

    Args:
        text: streams and shares.
        length: tokens that a window feeds to the model; it holds one more, the last one's target.
        seed: fixes the order.

    Raises:
        ValueError: every stream is shorter than a window.
    """

    def __init__(self, text: Corpus, length: int, seed: int) -> None:
        self.text, self.length, self.seed = text, length, seed
        self.kinds = [kind for kind, stream in text.streams.items() if len(stream) > length]
        if not self.kinds:
            longest = max((len(stream) for stream in text.streams.values()), default=0)
            raise ValueError(f"a window takes {length + 1} tokens, the longest text has {longest}")
        self.steps = 0
        self.places = {kind: [0, 0] for kind in self.kinds}  # pass, and windows drawn in it
        self.drawn = dict.fromkeys(self.kinds, 0)
        self._order: dict[str, tuple[int, np.ndarray]] = {}

    @property
    def state(self) -> dict[str, Any]:
        """What ``load`` takes to go on from here: plain integers."""
        return {
            "steps": self.steps,
            "places": {kind: list(place) for kind, place in self.places.items()},
            "drawn": dict(self.drawn),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another object with the same text, length and seed."""
        self.steps = state["steps"]
        self.places.update({kind: list(place) for kind, place in state["places"].items()})
        self.drawn.update(state["drawn"])

    def next(self, count: int) -> Tensor:
        """Draw the next windows: int64[count, length + 1]."""
        known = [kind for kind in self.kinds if self._passes(kind) < self.text.passes.get(kind, float("inf"))]
        kinds = known or self.kinds
        shares = np.array([self.text.shares[kind] for kind in kinds])
        rng = np.random.default_rng((self.seed, self.steps))
        picks = rng.choice(len(kinds), size=count, p=shares / shares.sum())
        self.steps += 1
        return torch.from_numpy(np.stack([self._window(kinds[pick]) for pick in picks]).astype(np.int64))

    def _passes(self, kind: str) -> float:
        """Count passes over a stream so far."""
        return self.drawn[kind] * self.length / len(self.text.streams[kind])

    def _window(self, kind: str) -> np.ndarray:
        """Draw the next window of a stream: int32[length + 1]."""
        place = self.places[kind]
        starts = self._starts(kind, place[0])
        if place[1] == len(starts):
            place[0], place[1] = place[0] + 1, 0
            starts = self._starts(kind, place[0])
        start = int(starts[place[1]])
        place[1] += 1
        self.drawn[kind] += 1
        return self.text.streams[kind][start : start + self.length + 1]

    def _starts(self, kind: str, number: int) -> np.ndarray:
        """Order the windows of a pass; they begin at an offset of the pass's own."""
        if self._order.get(kind, (-1,))[0] != number:
            rng = np.random.default_rng((self.seed, self.kinds.index(kind), number))
            last = len(self.text.streams[kind]) - self.length - 1
            offset = int(rng.integers(0, min(self.length, last + 1)))
            self._order[kind] = number, rng.permutation(np.arange(offset, last + 1, self.length))
        return self._order[kind][1]
