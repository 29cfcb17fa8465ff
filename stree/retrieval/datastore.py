"""A datastore of texts in one memory-mapped file; the longest match of a context is found by binary search.

It holds the texts reversed, so that a context is matched from its last token backwards, and their suffix array (as REST
does, arXiv 2311.08252). The file is in the safetensors format, so loading one runs no code.
"""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from stree.checks import integer
from stree.files import replacing
from stree.retrieval.continuations import Nodes

__all__ = ["Datastore"]

FORMAT = "stree-datastore-2"
LONGEST_MATCH = 32  # context tokens that are compared; a power of two
LONGEST_CONTINUATION = 16
MOST_OCCURRENCES = 64  # occurrences read for one match, evenly spaced among all
TOKEN_BYTES = 4  # big-endian


class Datastore:
    """Texts and their suffix array; immutable, so one object can be shared by any number of runs.

    Attributes:
        vocab_size: size of the vocabulary of the texts.
        tokenizer: a name or fingerprint of the tokenizer, "" if unknown.
        num_tokens: number of tokens stored, including one separator per document.
    """

    def __init__(self, text: np.ndarray, order: np.ndarray, vocab_size: int, tokenizer: str) -> None:
        self._text, self._order = text, order  # uint8[4 x size], uint32[size]
        self.vocab_size, self.tokenizer, self.num_tokens = vocab_size, tokenizer, len(order)

    @classmethod
    def build(
        cls, documents: Iterable[Sequence[int]], vocab_size: int, *, tokenizer: str = "", max_tokens: int = 1 << 26
    ) -> Datastore:
        """Index token lists.

        Args:
            documents: token lists; no match crosses from one into the next.
            vocab_size: upper bound of the tokens.
            tokenizer: stored with the texts, so that users can compare it.
            max_tokens: largest store; it takes 8 bytes per token in the file and about 60 while building.

        Raises:
            TypeError: something else than lists of integers, or a number that is none.
            ValueError: no tokens, more than ``max_tokens``, or one outside the vocabulary.
        """
        vocab_size, max_tokens = integer("vocab_size", vocab_size), integer("max_tokens", max_tokens)
        if not 0 < vocab_size < 1 << 8 * TOKEN_BYTES:
            raise ValueError(f"vocab_size must be in [1, 2**32), got {vocab_size}")
        if not hasattr(documents, "__iter__") or getattr(documents, "ndim", 1) == 0:
            raise TypeError(f"documents must be token lists, got {documents!r:.80}")
        parts: list[np.ndarray] = []
        size = 0
        for number, document in enumerate(documents):
            part = _tokens(number, document)
            if part.size and not 0 <= part.min() <= part.max() < vocab_size:
                bad = int(part.min() if part.min() < 0 else part.max())
                raise ValueError(f"document {number} has token {bad}, outside the vocabulary of {vocab_size}")
            parts += [part, np.array([vocab_size])]
            size += part.size + 1
            if size > max_tokens:
                raise ValueError(f"the documents exceed max_tokens {max_tokens}")
        if size == len(parts) // 2:
            raise ValueError("a datastore needs at least one token, got none")
        reverse = np.concatenate(parts)[::-1]
        text, order = reverse.astype(">u4").view(np.uint8), _suffix_order(reverse)
        text.flags.writeable = order.flags.writeable = False
        return cls(text, order, vocab_size, tokenizer)

    def save(self, path: str | Path) -> None:
        """Write one file, atomically."""
        metadata = {
            "format": FORMAT, "vocab_size": str(self.vocab_size), "tokenizer": self.tokenizer,
            "checksum": _checksum(self._text, self._order),
        }  # fmt: skip
        with replacing(path) as beside:
            save_file({"text": self._text, "order": self._order}, beside, metadata=metadata)

    @classmethod
    def load(cls, path: str | Path) -> Datastore:
        """Map a file that ``save`` wrote.

        Raises:
            ValueError: the file is missing, truncated, damaged, or not a datastore of this format.
            TypeError: no path.
        """
        if not isinstance(path, (str, Path)):
            raise TypeError(f"path must be a path of a datastore, got {path!r:.80}")
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 no mapping
                shapes = {name: part.get_shape() for name, part in parts.items()}
                dtypes = {name: part.get_dtype() for name, part in parts.items()}
        except (OSError, SafetensorError) as error:
            raise ValueError(f"no datastore can be read at {str(path)!r}: {error}") from error
        size = (shapes.get("order") or [0])[0]
        is_whole = dtypes == {"text": "U8", "order": "U32"} and metadata.get("vocab_size", "").isdigit()
        if metadata.get("format") != FORMAT or shapes.get("text") != [TOKEN_BYTES * size] or not size or not is_whole:
            raise ValueError(
                f"{str(path)!r} is no datastore of format {FORMAT}, got {metadata.get('format')!r}; build it anew"
            )
        with open(path, "rb") as raw:
            whole = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
        # safetensors: 8 bytes of header length, a JSON header with the offset of each tensor, the tensors.
        body = 8 + int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8:body])
        text, order = (body + int(header[name]["data_offsets"][0]) for name in ("text", "order"))
        content = np.frombuffer(whole, np.uint8, TOKEN_BYTES * size, text), np.frombuffer(whole, np.uint32, size, order)
        if metadata.get("checksum") != _checksum(*content):
            raise ValueError(f"datastore {str(path)!r} is damaged: its checksum differs; build it anew")
        return cls(*content, int(metadata["vocab_size"]), metadata.get("tokenizer", ""))

    def lay_out(self, context: Sequence[int], nodes: Nodes, min_match: int = 2) -> int:
        """Write the most frequent continuations of the longest suffix of a context that occurs in the store.

        Values are estimated as in ``SuffixAutomaton.lay_out``, from the longest match and a match of half its length.

        Args:
            context: the text so far; its last 32 tokens are compared.
            nodes: is filled, as far as there are continuations.
            min_match: shortest match that may predict.

        Returns:
            The number of nodes, the root included.
        """
        from stree.retrieval import numba_datastore  # imports numba

        key = np.array(context[: -LONGEST_MATCH - 1 : -1], dtype=np.int64)
        store = numba_datastore.Store(self._text, self._order, self.vocab_size, LONGEST_CONTINUATION)
        return int(numba_datastore.draft_from_datastore(store, key, min_match, MOST_OCCURRENCES, nodes))


def _tokens(number: int, document: Any) -> np.ndarray:
    """Return int64[length] tokens of a document.

    Raises:
        TypeError: something else than a list of integers.
    """
    try:
        part = np.asarray(document)
        if part.ndim == 1 and (not part.size or part.dtype.kind in "iu"):
            return part.astype(np.int64)
    except (TypeError, ValueError):  # rows of different lengths
        pass
    raise TypeError(f"document {number} must be a list of token ids, integers, got {document!r:.80}")


def _checksum(text: np.ndarray, order: np.ndarray) -> str:
    """CRC-32 of a store's content."""
    return f"{zlib.crc32(order.data, zlib.crc32(text.data)):08x}"


def _suffix_order(symbols: np.ndarray) -> np.ndarray:
    """Sort all suffixes by prefix doubling (Manber and Myers, 1993), as far as ``LONGEST_MATCH`` tokens: uint32[n]."""
    rank = np.unique(symbols, return_inverse=True)[1].astype(np.int64) + 1  # 0 is past the end
    size, span = len(rank), 1
    while True:
        beyond = np.zeros(size, dtype=np.int64)
        beyond[: max(size - span, 0)] = rank[span:]
        pair = rank * (size + 1) + beyond
        order = np.argsort(pair, kind="stable")
        span *= 2
        if span >= LONGEST_MATCH:
            return order.astype(np.uint32)
        ordered = pair[order]
        rank[order] = np.concatenate(([0], np.cumsum(ordered[1:] != ordered[:-1]))) + 1
