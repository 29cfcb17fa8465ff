"""Which tokens a drafter's head keeps: the most frequent ones of some text, read from and written to a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from stree.files import replacing

__all__ = ["check_keep", "load_vocabulary", "most_frequent", "save_vocabulary"]


def check_keep(keep: int, vocab_size: int, always: Iterable[int] = ()) -> None:
    """Refuse to keep too many tokens, none, or fewer than must stay.

    Raises:
        ValueError: keep outside [1, vocab_size] or below the number of tokens always kept.
    """
    least = max(len(set(always)), 1)
    if not least <= keep <= vocab_size:
        raise ValueError(f"keep must be in [{least}, {vocab_size}], got {keep}")


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
    check_keep(keep, vocab_size, forced)
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
    """Write a trimmed vocabulary as JSON, whole or not at all."""
    with replacing(path) as beside:
        beside.write_text(json.dumps({"vocab_size": vocab_size, "kept": list(tokens)}) + "\n", encoding="utf-8")


def load_vocabulary(path: str | Path, vocab_size: int, needed: Iterable[int] = ()) -> list[int]:
    """Read a trimmed vocabulary.

    Args:
        path: of the file.
        vocab_size: logits of the drafter.
        needed: tokens that it must hold: those that end a text.

    Raises:
        ValueError: no such file, not one of ours, made for a vocabulary of another size, or a needed token left out.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        kept, size = [int(token) for token in found["kept"]], int(found["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"no trimmed vocabulary can be read at {str(path)!r}: {error!r}") from error
    if size != vocab_size:
        raise ValueError(f"the trimmed vocabulary at {str(path)!r} is of {size} tokens, the drafter has {vocab_size}")
    lost = sorted(set(needed) - set(kept))
    if lost:
        raise ValueError(f"the trimmed vocabulary at {str(path)!r} leaves out the target's stop tokens {lost}")
    return kept
