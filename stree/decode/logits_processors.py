"""Logits processors on a tree: every node's logits are processed with the text that ends in that node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from stree.models.tree_lm import TreeLM
from stree.tree import TokenTree

__all__ = ["LogitsProcessor", "Node", "NodeProcessor", "RepetitionPenalty", "RowProcessors", "processed"]

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A node whose logits are processed.

    Attributes:
        row: its sequence.
        text: int64[length], everything from the prompt's first token to the node itself.
    """

    row: int
    text: Tensor


class NodeProcessor(Protocol):
    """Processes the logits of many nodes."""

    looks_at_text: bool  # False: only the logits matter, and ``nodes`` is empty

    def begin(self, row: int, processors: Sequence[LogitsProcessor]) -> None:
        """Learn the processors of the sequence that a row holds from now on."""
        ...

    def __call__(self, nodes: Sequence[Node], logits: Tensor) -> Tensor:
        """Return new logits float[nodes, vocab]; the nodes are of one depth."""
        ...


class RowProcessors:
    """Calls every sequence's own processors, of int64[1, length] text and float[1, vocab] logits, for each node."""

    looks_at_text = True

    def __init__(self) -> None:
        self._rows: dict[int, Sequence[LogitsProcessor]] = {}

    def begin(self, row: int, processors: Sequence[LogitsProcessor]) -> None:
        """Use other processors for a row."""
        self._rows[row] = processors

    def __call__(self, nodes: Sequence[Node], logits: Tensor) -> Tensor:
        """Process node by node."""
        processed = []
        for node, row in zip(nodes, logits.split(1), strict=True):
            for processor in self._rows[node.row]:
                row = processor(node.text[None], row)
            processed.append(row)
        return torch.cat(processed)


class RepetitionPenalty:
    """Divides the logits of tokens that are in the text, the prompt included, by a penalty; multiplies negative ones.

    CTRL (Keskar et al., 2019), as transformers' ``RepetitionPenaltyLogitsProcessor`` does.

    Args:
        penalty: above 1 for less repetition.

    Raises:
        TypeError: not a number.
        ValueError: not above 0.
    """

    def __init__(self, penalty: float) -> None:
        if not hasattr(penalty, "__float__") or isinstance(penalty, Tensor):
            raise TypeError(f"repetition_penalty must be a number, got {penalty!r:.80}")
        if not 0 < penalty < float("inf"):
            raise ValueError(f"repetition_penalty must be above 0 and finite, got {penalty}")
        self.penalty = float(penalty)

    def __call__(self, text: Tensor, logits: Tensor) -> Tensor:
        """Return new logits float[1, vocab] of what follows int64[1, length] text."""
        seen = logits.gather(1, text)
        return logits.scatter(1, text, torch.where(seen < 0, seen * self.penalty, seen / self.penalty))


def processed(lm: TreeLM, processor: NodeProcessor, *, is_target: bool, is_greedy: bool = True) -> TreeLM:
    """Wrap a model so that its logits go through a processor, for one generation.

    Args:
        lm: the model, which is not changed.
        processor: applied to its logits.
        is_target: whether a node whose token its parent's processed distribution excludes may be left out: the target
            cannot accept it, so the processor is not called with a text that it has excluded.
        is_greedy: whether the target's tokens are the most likely ones, and token 0 where a processor that looks at
            the text leaves none, as in transformers; else such a text is refused when it is reached.
    """
    return cast(TreeLM, _ProcessedLM(lm, processor, is_target, is_greedy))


class _ProcessedLM:
    """A TreeLM's prefill, verify and commit with processed logits; it holds the texts of one batch."""

    def __init__(self, lm: TreeLM, processor: NodeProcessor, is_target: bool, is_greedy: bool) -> None:
        self._lm, self._processor, self._is_target = lm, processor, is_target
        self._may_end = is_greedy or not is_target  # in a text after which no token is left
        self._texts: list[Tensor] = []
        self._is_end = torch.empty(0)  # bool[batch, nodes] of the pending tree
        self.raw_logits = torch.empty(0)  # before the processor, of the last prefill or verify

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    def prefill(self, state: Any, input_ids: Tensor, lengths: Tensor, **recorded: Any) -> Any:
        """Run prompts; process the logits of what follows them.  ``recorded`` may hold ``hidden_layers``."""
        result = self._lm.prefill(state, input_ids, lengths, **recorded)
        rows = input_ids.to(self._lm.device)
        self._texts = [row[:length] for row, length in zip(rows, lengths.tolist(), strict=True)]
        return self._first([Node(row, text) for row, text in enumerate(self._texts)], result)

    def prefill_row(self, state: Any, row: int, input_ids: Tensor, **recorded: Any) -> Any:
        """Run another prompt into a row; likewise."""
        result = self._lm.prefill_row(state, row, input_ids, **recorded)
        self._texts[row] = input_ids[0].to(self._lm.device)
        return self._first([Node(row, self._texts[row])], result)

    def _first(self, nodes: Sequence[Node], result: Any) -> Any:
        """Process the logits of first tokens; hidden states beside them are passed on."""
        self.raw_logits, hidden = result if isinstance(result, tuple) else (result, None)
        logits = self.raw_logits
        logits = self._process(nodes if self._processor.looks_at_text else [], logits.clone())
        if not self._may_end:
            _refuse(_leaves_none(logits))
        return logits if hidden is None else (logits, hidden)

    def verify(self, state: Any, tree: TokenTree, first: int = 0, **recorded: Any) -> Any:
        """Score a tree; process the logits of nodes first.. along their own paths."""
        result = self._lm.verify(state, tree, first, **recorded)
        self.raw_logits, hidden = result if isinstance(result, tuple) else (result, None)
        logits = self._along_paths(tree, first, self.raw_logits)
        return logits if hidden is None else (logits, hidden)

    def _along_paths(self, tree: TokenTree, first: int, logits: Tensor) -> Tensor:
        """Process float[batch, n - first, vocab] logits of a tree's nodes, each with its own text."""
        if not self._processor.looks_at_text:
            return self._process([], logits.flatten(0, 1)).view_as(logits)
        logits = logits.clone()
        texts = {(row, -1): text for row, text in enumerate(self._texts)}
        for rows, columns in _levels(tree):
            rows, columns = self._possible(tree, rows, columns, logits, texts, first)
            above, tokens = tree.parents[rows, columns].tolist(), tree.tokens[rows, columns]
            for place, (row, column) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
                texts[row, column] = torch.cat([texts[row, above[place]], tokens[place : place + 1]])
            rows, columns = rows[columns >= first], columns[columns >= first]
            if len(rows):
                places = zip(rows.tolist(), columns.tolist(), strict=True)
                nodes = [Node(row, texts[row, column]) for row, column in places]
                logits[rows, columns - first] = self._process(nodes, logits[rows, columns - first])
        self._is_end = _leaves_none(logits)
        return logits

    def commit(self, state: Any, path: Tensor, path_lengths: Tensor) -> None:
        """Advance the state, and the texts with it."""
        if self._processor.looks_at_text:
            tree = state.pending
            nodes = path.long().clamp(0, tree.tokens.shape[1] - 1)  # past its length, anything
            if not self._may_end:
                is_on_path = torch.arange(nodes.shape[1], device=nodes.device) < path_lengths[:, None]
                _refuse((self._is_end.gather(1, nodes) & is_on_path).any(1))
            tokens = tree.tokens.gather(1, nodes)
            for row, length in enumerate(path_lengths.tolist()):
                self._texts[row] = torch.cat([self._texts[row], tokens[row, :length]])
        self._lm.commit(state, path, path_lengths)

    def _process(self, nodes: Sequence[Node], logits: Tensor) -> Tensor:
        """Process float[nodes, vocab]; a draft model's own logits are kept where the processor leaves no token."""
        result = self._processor(nodes, logits).to(logits)
        return result if self._is_target else torch.where(_leaves_none(result)[:, None], logits, result)

    def _possible(
        self, tree: TokenTree, rows: Tensor, columns: Tensor, logits: Tensor, texts: dict[Any, Tensor], first: int
    ) -> tuple[Tensor, Tensor]:
        """Keep the nodes of a level that the target may reach: their parent was kept and does not exclude them."""
        if not self._is_target or first or not int(columns[0]):
            return rows, columns
        above = tree.parents[rows, columns].long()
        has_chance = logits[rows, above, tree.tokens[rows, columns]] > -torch.inf
        has_chance |= _leaves_none(logits[rows, above])
        known = [(row, parent) in texts for row, parent in zip(rows.tolist(), above.tolist(), strict=True)]
        kept = has_chance & torch.tensor(known, device=rows.device)
        return rows[kept], columns[kept]


def _leaves_none(logits: Tensor) -> Tensor:
    """Where float[..., vocab] logits exclude every token: bool[...]."""
    return logits.amax(-1) == -torch.inf


def _refuse(is_end: Tensor) -> None:
    """Refuse bool[batch] texts after which no token is left to draw."""
    if bool(is_end.any()):
        raise ValueError(f"the logits processor leaves no token to draw in rows {is_end.nonzero().flatten().tolist()}")


def _levels(tree: TokenTree) -> list[tuple[Tensor, Tensor]]:
    """List the nodes that are not padding by depth: int64[count] rows and columns."""
    depths = torch.where(tree.is_padding, -1, tree.depths)
    levels = [(depths == depth).nonzero(as_tuple=True) for depth in range(int(depths.max()) + 1)]
    return [(rows, columns) for rows, columns in levels]
