"""Text that the target writes itself, from beginnings drawn out of the training text.

A drafter trained on it meets the laws that it will be asked about (VocabTrim, arXiv 2506.22694, counts on it likewise).
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from stree.distill.folder import reading
from stree.distill.text import Text, pack
from stree.drafters import NoDrafter
from stree.files import replacing
from stree.generation import generate
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling

__all__ = ["draw_prompts", "write_continuations"]

ROWS = 32
PROMPT_LENGTH = 32
NEW_TOKENS = 384


def draw_prompts(text: Text, count: int, length: int, rng: np.random.Generator) -> list[list[int]]:
    """Draw beginnings: a short document whole, of a longer one some tokens that stand at a random place.

    Args:
        text: the kinds are drawn by their shares, documents by their lengths.
        count: how many.
        length: most tokens of one.
        rng: of the draws.
    """
    kinds = [kind for kind, stream in text.streams.items() if len(stream)]
    shares = np.array([text.shares[kind] for kind in kinds])
    prompts: list[list[int]] = []
    while len(prompts) < count:
        stream = text.streams[kinds[rng.choice(len(kinds), p=shares / shares.sum())]]
        place = int(rng.integers(len(stream)))
        low, high = _document(stream, place, text.separator, length)
        start = max(low, min(place, high - length))
        if high > start:
            prompts.append(stream[start : min(start + length, high)].tolist())
    return prompts


def _document(stream: np.ndarray, place: int, separator: int | None, reach: int) -> tuple[int, int]:
    """Find where the document around a place begins and ends, as far as ``reach`` tokens to either side."""
    low, high = max(0, place - reach), min(len(stream), place + reach)
    if separator is None:
        return low, high
    before = np.flatnonzero(stream[low:place] == separator)
    after = np.flatnonzero(stream[place:high] == separator)
    return low + (int(before[-1]) + 1 if before.size else 0), place + int(after[0]) if after.size else high


def write_continuations(
    lm: TreeLM,
    text: Text,
    path: Path,
    *,
    temperature: float,
    seed: int,
    least: int = 1,
    seconds: float | None = None,
    tokens: int | None = None,
    resume: bool = False,
    rows: int = ROWS,
    new_tokens: int = NEW_TOKENS,
    save_every: float = 60.0,
) -> np.ndarray:
    """Let the target continue prompts until there is enough text; a stop token ends a continuation.

    Args:
        lm: the target.
        text: where prompts come from.
        path: file of what is finished; written as it grows.
        temperature: of the continuations; 0 is greedy.
        seed: of prompts and continuations.
        least: tokens that are needed in any case, prompts included.
        seconds: time to spend.
        tokens: tokens to write instead.
        resume: go on with what ``path`` holds.
        rows: sequences that run together.
        new_tokens: most new tokens of one.
        save_every: seconds between writes of the file.

    Returns:
        int32[total], prompts with their continuations, the separator after each.
    """
    length = PROMPT_LENGTH
    if lm.max_length is not None:
        length = min(length, lm.max_length // 2)
        new_tokens = min(new_tokens, lm.max_length - length)
    if tokens is not None:
        new_tokens = max(1, min(new_tokens, tokens // rows))
    stop = lm.model.generation_config.eos_token_id
    stops = stop if isinstance(stop, list) else [] if stop is None else [stop]
    parts, number, spent = _read(path) if resume and path.exists() else ([], 0, 0.0)
    last = last_save = time.monotonic()
    goal = tokens if tokens is not None else seconds or 0.0
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("generate", total=goal)
        while True:
            size = sum(map(len, parts))
            bar.update(task, completed=min(size if tokens is not None else spent, goal))
            if size >= max(least, tokens or 0) and spent >= (seconds or 0.0):
                break
            prompts = draw_prompts(text, rows, length, np.random.default_rng((seed, number)))
            clock = _Clock(least - size - sum(map(len, prompts)), None if seconds is None else last + seconds - spent)
            out = generate(
                lm, prompts, NoDrafter(), budget=1, sampling=Sampling(temperature), max_new_tokens=new_tokens,
                stop_token_ids=stops, seed=seed * 1_000_003 + number, cancelled=clock.is_over,
            )  # fmt: skip
            ended = [row[:-1] if row[-1] == text.separator else row for row in out.sequences]
            parts.append(pack(ended, text.separator))
            number, now = number + 1, time.monotonic()
            spent, last = spent + now - last, now
            if now - last_save >= save_every:
                _write(path, parts, number, spent)
                last_save = now
    _write(path, parts, number, spent)
    return np.concatenate(parts)


class _Clock:
    """Ends the continuations of a batch when the time is up, but not before so many tokens were written."""

    def __init__(self, least: int, deadline: float | None) -> None:
        self._least, self._deadline = least, deadline

    def is_over(self, sequence: int) -> bool:
        """Tell so; asked once for every token."""
        self._least -= 1
        return self._deadline is not None and self._least < 0 and time.monotonic() > self._deadline


def _write(path: Path, parts: list[np.ndarray], number: int, spent: float) -> None:
    """Save what is finished, whole or not at all."""
    with replacing(path) as beside, beside.open("wb") as file:
        np.savez(file, tokens=np.concatenate(parts), number=number, spent=spent)


def _read(path: Path) -> tuple[list[np.ndarray], int, float]:
    """Read what was finished: tokens, batches and seconds."""
    with reading(path), np.load(path, allow_pickle=False) as saved:
        return [saved["tokens"]], int(saved["number"]), float(saved["spent"])
