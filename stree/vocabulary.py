"""Which tokens a drafter's head keeps: the most frequent ones of some text, read from and written to a file.

It knows tokens only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

__all__ = ["load_vocabulary", "most_frequent", "save_vocabulary"]


def most_frequent(texts: Iterable[Sequence[int]], vocab_size: int, keep: int, always: Iterable[int] = ()) -> list[int]:
    """List the most frequent tokens of some texts, ascending; of equally frequent ones the lower.

    Args:
        texts: token lists, best from the target itself (VocabTrim, arXiv 2506.22694), else a corpus (FR-Spec).
        vocab_size: tokens of the vocabulary.
        keep: how many.
        always: tokens kept whatever their count, such as stop tokens; they count towards ``keep``.

    Raises:
        ValueError: keep outside [1, vocab_size] or below the number of tokens always kept, or a token outside.
    """
    forced = sorted(set(always))
    if not max(len(forced), 1) <= keep <= vocab_size:
        raise ValueError(f"keep must be in [{max(len(forced), 1)}, {vocab_size}], got {keep}")
    counts = np.zeros(vocab_size, dtype=np.int64)
    for text in texts:
        part = np.asarray(text, dtype=np.int64)
        if part.size and not 0 <= part.min() <= part.max() < vocab_size:
            bad = int(part.min() if part.min() < 0 else part.max())
            raise ValueError(f"token {bad} is outside the vocabulary of {vocab_size}")
        counts += np.bincount(part, minlength=vocab_size)
    counts[forced] = np.iinfo(np.int64).max
    return sorted(np.argsort(-counts, kind="stable")[:keep].tolist())


def save_vocabulary(path: str | Path, tokens: Sequence[int], vocab_size: int) -> None:
    """Write a trimmed vocabulary as JSON."""
    Path(path).write_text(json.dumps({"vocab_size": vocab_size, "kept": list(tokens)}) + "\n", encoding="utf-8")


def load_vocabulary(path: str | Path, vocab_size: int) -> list[int]:
    """Read a trimmed vocabulary.

    Raises:
        ValueError: no such file, not one of ours, or made for a vocabulary of another size.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        kept, size = [int(token) for token in found["kept"]], int(found["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"no trimmed vocabulary can be read at {str(path)!r}: {error!r}") from error
    if size != vocab_size:
        raise ValueError(f"the trimmed vocabulary at {str(path)!r} is of {size} tokens, the drafter has {vocab_size}")
    return kept
