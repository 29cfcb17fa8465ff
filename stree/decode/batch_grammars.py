"""Grammars of a batch: which tokens may follow each node of its trees, as one mask.

Each row has a matcher that takes the tokens that were accepted, and no others; copies of it follow the paths of a
tree.  Masks that the draft model's logits have needed are kept for the target's.  This is work of the host, between the
draft and the target's forward: bits of the masks are copied to fixed memory, from which captured steps read them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stree.decode.grammar import CompiledGrammar
from stree.kernels.host_copies import download, upload
from stree.kernels.step.texts import Seen
from stree.tree import TokenTree

__all__ = ["BatchGrammars"]


class BatchGrammars:
    """The grammars of a batch, with a row for each sequence.

    Args:
        batch: rows.
        vocab_size: of the logits.
        device: of the logits.

    Attributes:
        is_active: whether a running sequence has a grammar.
    """

    def __init__(self, batch: int, vocab_size: int, device: torch.device) -> None:
        self._rows: list[_Row | None] = [None] * batch
        self.is_active = False
        self._vocab_size, self._device = vocab_size, device
        bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
        self._bits = bits.to(torch.uint8).view(torch.int64).flatten()  # eight bools for each byte
        self._allowed = torch.empty(batch, 0, 0, dtype=torch.uint8, device=device)  # bits of the masks of trees

    @property
    def problems(self) -> dict[int, Exception]:
        """Rows whose grammars are too complex to be followed further, which are masked no more."""
        rows = enumerate(self._rows)
        return {row: own.problem for row, own in rows if own is not None and own.problem is not None}

    def begin(self, row: int, grammar: CompiledGrammar | None, prompt_length: int) -> None:
        """Use another grammar, or none, for a row, whose prompt has so many tokens."""
        self._rows[row] = None if grammar is None else _Row(grammar, prompt_length)
        self.is_active = any(self._rows)

    def end(self, row: int) -> None:
        """Drop the grammar of a row whose sequence has ended."""
        self.begin(row, None, 0)

    def advance(self, seen: Seen) -> None:
        """Take the tokens that the texts have now, pending ones included."""
        if not self.is_active:
            return
        lengths = seen.lengths.tolist()
        for row, (own, length) in enumerate(zip(self._rows, lengths, strict=True)):
            if own is not None:
                own.advance(seen.tokens[row, own.length : length + 1].tolist())

    def forced(self) -> list[list[int]]:
        """Return, for each row, the tokens that the grammar forces behind the text."""
        return [[] if own is None else own.forced() for own in self._rows]

    def first(self, rows: Tensor, logits: Tensor) -> Tensor:
        """Mask float[count, vocab] logits of the first tokens of int64[count] rows."""
        if not self.is_active:
            return logits
        masks = [None if (own := self._rows[row]) is None else own.mask() for row in rows.tolist()]
        allowed = self._packed([{} if mask is None else {0: mask} for mask in masks], 1)
        return self._masked(logits[:, None], allowed)[:, 0]

    def drafted(self, lengths: Tensor, tree: TokenTree, logits: Tensor) -> Tensor:
        """Mask the logits of the last columns of a draft model's tree.

        A node that its grammar excludes is left as it is: the target cannot accept it.  So is one that ends its text,
        for nothing is read of what follows.

        Args:
            lengths: int64[batch], tokens before the trees' roots.
            tree: of n nodes; it begins with the last tokens that ``advance`` has taken.
            logits: float[batch, columns, vocab].
        """
        return self._masked(logits, self._of_tree(lengths, tree, logits.shape[1]))

    def lay_out(self, lengths: Tensor, tree: TokenTree, most_nodes: int) -> None:
        """Copy the masks of a tree's nodes to memory for at least ``most_nodes``, for ``verified`` to read."""
        allowed = self._of_tree(lengths, tree, n := tree.tokens.shape[1])
        if n > self._allowed.shape[1]:
            self._allowed = allowed.new_empty(len(allowed), max(n, most_nodes), allowed.shape[2])
        self._allowed[:, :n] = allowed

    def verified(self, logits: Tensor) -> Tensor:
        """Mask the target's float[batch, n, vocab] logits of the tree that was laid out; the host does nothing."""
        return self._masked(logits, self._allowed[:, : logits.shape[1]]) if self.is_active else logits

    def _of_tree(self, lengths: Tensor, tree: TokenTree, columns: int) -> Tensor:
        """Return the masks of a tree's last columns, see ``_packed``."""
        first = tree.tokens.shape[1] - columns
        parts = (part.tolist() for part in download([lengths, tree.tokens, tree.parents]))
        trees = zip(self._rows, *parts, strict=True)
        return self._packed([{} if own is None else own.masks(first, *each) for own, *each in trees], columns)

    def _packed(self, masks: list[dict[int, Any]], columns: int) -> Tensor:
        """Return uint8[batch, columns, bytes], a bit for each token, of masks of some columns of each row."""
        allowed = np.full((len(masks), columns, -(-self._vocab_size // 32) * 4), 255, np.uint8)
        for row, own in enumerate(masks):
            for column, mask in own.items():
                allowed[row, column, : len(mask)] = mask
        return upload([torch.from_numpy(allowed).view(torch.int32)], self._bits)[0].view(torch.uint8)

    def _masked(self, logits: Tensor, allowed: Tensor) -> Tensor:
        """Exclude tokens of float[batch, columns, vocab] logits, by the bits of masks."""
        is_allowed = self._bits[allowed.int()].view(torch.bool)[..., : self._vocab_size]
        return torch.where(is_allowed, logits, -torch.inf)


class _Row:
    """The grammar of one text.

    Args:
        grammar: compiled for the tokenizer.
        prompt_length: tokens before the text.

    Attributes:
        length: tokens of the text that were accepted, those of the prompt included.
    """

    def __init__(self, grammar: CompiledGrammar, prompt_length: int) -> None:
        self._grammar, self.length = grammar, prompt_length
        self._accepted, self._matcher = grammar.matcher(), grammar.matcher()  # behind the text, and behind ``_path``
        self._problems = dict[tuple[int, ...], Exception]()  # by tokens behind the text: no mask could be made there
        self._is_over = False  # tokens stand behind its end, which the host has not seen yet
        self._path: tuple[int, ...] = ()  # tokens of a tree that the matcher has taken, too
        self._masks: dict[tuple[int, ...], Any] = {}  # by the tokens behind the text; what drafts have needed

    @property
    def problem(self) -> Exception | None:
        """Why the grammar cannot be followed behind the text, or None."""
        return self._problems.get(())

    def advance(self, tokens: list[int]) -> None:
        """Take tokens of the text."""
        met = [problem for path, problem in self._problems.items() if path == tuple(tokens[: len(path)])]
        self._problems = {(): met[0]} if met else {}  # those of other paths of the tree are no problem of the text
        self._is_over |= self._accepted.try_consume_tokens(tokens) < len(tokens)
        self._matcher, self._path = self._accepted.deep_copy(), ()
        self.length += len(tokens)
        self._masks.clear()

    def mask(self, path: tuple[int, ...] = ()) -> Any:
        """Return what may follow the text and some more tokens, see ``CompiledGrammar.mask``; None if not these."""
        if path not in self._masks:
            try:
                is_allowed = self._allows(path) and self._follow(path)
                self._masks[path] = self._grammar.mask(self._matcher) if is_allowed else None
            except ValueError as problem:
                self._problems[path], self._masks[path] = problem, None
        return self._masks[path]

    def masks(self, first: int, start: int, tokens: list[int], parents: list[int]) -> dict[int, Any]:
        """Return the masks of a tree's columns from ``first`` on; its root is token ``start`` of the text."""
        found, paths = dict[int, Any](), list[tuple[int, ...]]()
        num_known = self.length - start  # nodes of each path that the text has already
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
            is_node = node >= first and (node == 0 or parent >= 0) and len(paths[node]) >= num_known
            if is_node and (mask := self.mask(paths[node][num_known:])) is not None:
                found[node - first] = mask
        return found

    def forced(self) -> list[int]:
        """Return the tokens that alone may follow the text, one behind the other."""
        is_there = not self._is_over and self._follow(())
        return self._matcher.compute_ff_tokens() if is_there else []

    def _allows(self, path: tuple[int, ...]) -> bool:
        """Whether the mask above a path's end, where it is known, has the last token."""
        above = self._masks.get(path[:-1]) if path else None
        if above is None:
            return not self._is_over and (not path or path[:-1] not in self._masks)
        return bool(above[path[-1] // 8] >> path[-1] % 8 & 1)

    def _follow(self, path: tuple[int, ...]) -> bool:
        """Let the matcher stand behind some more tokens; False where the grammar excludes them."""
        # Copied: llguidance's rollback is wrong behind tokens like <[5]>, and a matcher takes nothing after an error.
        if path[: len(self._path)] != self._path or self._matcher.is_error():
            self._matcher, self._path = self._accepted.deep_copy(), ()
        begin = len(self._path)
        self._path = path[: begin + self._matcher.try_consume_tokens([*path[begin:]])]
        return len(self._path) == len(path)
