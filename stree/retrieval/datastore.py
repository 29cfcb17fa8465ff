"""A store of texts in one memory-mapped file: the longest match of a context is found by binary search.

The texts stand reversed, so that a context is looked up from its last token backwards, beside the order of all their
suffixes (REST, arXiv 2311.08252, keeps a suffix array too).  The file is in the safetensors format: no code is run by
loading one.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from stree.retrieval.continuations import Candidate, Continuations, best_first

__all__ = ["Datastore"]

FORMAT = "stree-datastore-1"
LONGEST_MATCH = 32  # tokens of context that are compared; a power of two
LONGEST_CONTINUATION = 16
MOST_OCCURRENCES = 64  # of one match that are looked at, evenly spaced among all
MOST_CHILDREN = 8
WIDTH = 4  # bytes of a token, big-endian, so that bytes compare as tokens do

Place = tuple[int, list[int]]  # depth, and the occurrences whose continuations agree up to there


class Datastore:
    """Texts, never changed once built; one object may serve any number of runs.

    Attributes:
        vocab_size: tokens of the vocabulary that the texts are written in.
        tokenizer: a name or fingerprint of the tokenizer, "" where it is not known.
        num_tokens: tokens stored, one separator a document included.
    """

    def __init__(
        self, text: bytes | mmap.mmap, order: np.ndarray, vocab_size: int, tokenizer: str, start: int = 0
    ) -> None:
        self._text, self._start = text, start  # the texts' bytes begin there; a slice of either is bytes
        self._order = order
        self._tokens = np.frombuffer(text, ">u4", len(order), start)
        self.vocab_size, self.tokenizer, self.num_tokens = vocab_size, tokenizer, len(order)

    @classmethod
    def build(
        cls, documents: Iterable[Sequence[int]], vocab_size: int, *, tokenizer: str = "", max_tokens: int = 1 << 26
    ) -> Datastore:
        """Index token lists.

        Args:
            documents: none continues into the next.
            vocab_size: every token is below it.
            tokenizer: kept beside the texts, for whoever wants to compare.
            max_tokens: bound of the store: 8 bytes a token in the file, about 60 while building.

        Raises:
            ValueError: no tokens, more than ``max_tokens``, or one outside the vocabulary.
        """
        parts: list[np.ndarray] = []
        size = 0
        for number, document in enumerate(documents):
            part = np.asarray(document, dtype=np.int64)
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
        return cls(reverse.astype(">u4").tobytes(), _suffix_order(reverse), vocab_size, tokenizer)

    def save(self, path: str | Path) -> None:
        """Write one file, whole or not at all."""
        path = Path(path)
        draft = path.with_name(path.name + ".part")
        metadata = {"format": FORMAT, "vocab_size": str(self.vocab_size), "tokenizer": self.tokenizer}
        text = np.frombuffer(self._text, np.uint8, WIDTH * self.num_tokens, self._start)
        try:
            save_file({"text": text, "order": np.ascontiguousarray(self._order)}, draft, metadata=metadata)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> Datastore:
        """Map a file that ``save`` wrote.

        Raises:
            ValueError: no such file, a truncated one, or one that is no datastore.
        """
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 no mapping
        except (OSError, SafetensorError) as error:
            raise ValueError(f"no datastore can be read at {str(path)!r}: {error}") from error
        size = shapes.get("order", [0])[0]
        if metadata.get("format") != FORMAT or shapes.get("text") != [WIDTH * size] or not size:
            raise ValueError(f"{str(path)!r} is no datastore of format {FORMAT}, got {metadata.get('format')!r}")
        with open(path, "rb") as raw:
            whole = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
        # The format: 8 bytes of header length, a JSON header that says where each tensor stands, the tensors.
        body = 8 + int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8:body])
        text, order = (body + int(header[name]["data_offsets"][0]) for name in ("text", "order"))
        order_view = np.frombuffer(whole, np.uint32, size, order)
        return cls(whole, order_view, int(metadata["vocab_size"]), metadata.get("tokenizer", ""), text)

    def tree(self, context: Sequence[int], max_nodes: int, min_match: int = 2) -> Continuations:
        """Lay out what followed the longest suffixes of a context that occur in the store.

        A node's value is estimated as in ``SuffixAutomaton.tree``, over the longest match and one of half its length.

        Args:
            context: the text so far; its last 32 tokens are looked at.
            max_nodes: most nodes, the root not counted.
            min_match: shortest match that may predict.
        """
        key = np.array(context[: -LONGEST_MATCH - 1 : -1], dtype=">u4").tobytes()
        length = self._longest_match(key)
        roots: dict[int, Candidate[Place]] = {}
        windows: list[list[int]] = []
        value = 1.0
        for matched in (length, length // 2):
            if matched < max(min_match, 1):
                break
            begin = len(windows)
            windows += self._windows(key[: WIDTH * matched])
            total, followers = self._followers(windows, 0, range(begin, len(windows)))
            value /= total
            for count, token, place in followers:
                if token not in roots:
                    roots[token] = (value * count, token, place)

        def expand(value: float, place: Place) -> list[Candidate[Place]]:
            total, followers = self._followers(windows, *place)
            return [(value * count / total, token, below) for count, token, below in followers]

        return best_first(roots.values(), expand, max_nodes)

    def _followers(
        self, windows: list[list[int]], depth: int, rows: Iterable[int]
    ) -> tuple[int, list[tuple[int, int, Place]]]:
        """Give 1 + the number of continuations at a depth of some windows, and the most frequent ones."""
        if depth >= LONGEST_CONTINUATION:
            return 1, []
        by_token: dict[int, list[int]] = {}
        for row in rows:
            by_token.setdefault(windows[row][depth], []).append(row)
        by_token.pop(self.vocab_size, None)
        best = sorted([(len(found), token) for token, found in by_token.items()], reverse=True)
        total = 1 + sum([count for count, _ in best])
        return total, [(count, token, (depth + 1, by_token[token])) for count, token in best[:MOST_CHILDREN]]

    def _windows(self, key: bytes) -> list[list[int]]:
        """Read what follows occurrences of a reversed string: lists of tokens; no node is grown past a separator."""
        low = self._bound(key, after=False)
        high = self._bound(key, after=True, low=low)
        count = min(high - low, MOST_OCCURRENCES)
        places = self._order[low + (np.arange(count) * (high - low)) // max(count, 1)].astype(np.int64)
        columns = places[:, None] - 1 - np.arange(LONGEST_CONTINUATION)
        tokens = self._tokens[columns.clip(0)].astype(np.int64)
        tokens[columns < 0] = self.vocab_size
        return tokens.tolist()  # type: ignore[no-any-return]

    def _longest_match(self, key: bytes) -> int:
        """Find how many tokens of a reversed context occur: the most that a neighbour in the order shares."""
        place = self._bound(key, after=False)
        longest = 0
        for neighbour in (place - 1, place):
            if 0 <= neighbour < self.num_tokens:
                begin = self._start + WIDTH * int(self._order[neighbour])
                other = self._text[begin : begin + len(key)]
                same = 0
                while same < min(len(key), len(other)) and key[same : same + WIDTH] == other[same : same + WIDTH]:
                    same += WIDTH
                longest = max(longest, same // WIDTH)
        return longest

    def _bound(self, key: bytes, *, after: bool, low: int = 0) -> int:
        """Find the first suffix that is not before ``key``, or the first that is after all that begin with it."""
        text, start, order, width, high = self._text, self._start, self._order, len(key), self.num_tokens
        while low < high:
            middle = (low + high) // 2
            begin = start + WIDTH * int(order[middle])
            found = text[begin : begin + width]
            if found < key or (after and found == key):
                low = middle + 1
            else:
                high = middle
        return low


def _suffix_order(symbols: np.ndarray) -> np.ndarray:
    """Sort all suffixes by their first tokens, doubling how many are compared (Manber and Myers, 1993): uint32[n]."""
    rank = np.unique(symbols, return_inverse=True)[1].astype(np.int64) + 1  # 0 stands past the end
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
