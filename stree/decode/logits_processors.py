"""Logits processors on a tree: every node's logits are processed with the text that ends in that node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from stree.decode.batch_grammars import BatchGrammars
from stree.decode.batch_token_rules import BatchTokenRules
from stree.decode.grammar import CompiledGrammar
from stree.decode.token_rules import TokenRules
from stree.drafters import TreeProcessor
from stree.kernels.step.texts import Seen, Texts
from stree.tree import TokenTree

__all__ = ["LogitsProcessor", "Node", "NodeProcessor", "RowProcessors", "TreeProcessing"]

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
            shape = row.shape
            for processor in self._rows[node.row]:
                row = processor(node.text[None], row)
                if not isinstance(row, Tensor) or row.shape != shape:
                    what = f"float{[*row.shape]}" if isinstance(row, Tensor) else f"{row!r:.80}"
                    raise TypeError(f"logits_processor must return logits float{[*shape]}, got {what}")
            processed.append(row)
        return torch.cat(processed)


class TreeProcessing:
    """Processes the logits of trees and of first tokens with the texts that end there, for target and draft model.

    Args:
        processor: called with the nodes of one depth, after token rules and grammars; None: logits stay as these leave
            them.
        batch: rows.
        vocab_size: of the logits.
        device: of the logits.
    """

    def __init__(self, processor: NodeProcessor | None, batch: int, vocab_size: int, device: torch.device) -> None:
        self._processor, self._sizes = processor, (vocab_size, device)
        self._stops = [frozenset[int]()] * batch
        self._rules, self._grammars = BatchTokenRules(batch, *self._sizes), BatchGrammars(batch, *self._sizes)

    @property
    def key(self) -> tuple[str, ...]:
        """Parts of the key of captured steps."""
        return (*self._rules.key, *("with a grammar",) * self._grammars.is_active)

    @property
    def problems(self) -> dict[int, Exception]:
        """Why rows cannot go on."""
        return self._grammars.problems

    def of_rows(self, count: int) -> TreeProcessing:
        """Return the same for another number of rows, none of which has begun."""
        return TreeProcessing(self._processor, count, *self._sizes)

    def begin(
        self, row: int, processors: Sequence[LogitsProcessor], rules: TokenRules, grammar: CompiledGrammar | None,
        prompt_length: int, stops: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        """Use other processors, rules, stop tokens and another grammar for a row, whose prompt has so many tokens."""
        self._stops[row] = stops
        self._rules.begin(row, rules, prompt_length)
        self._grammars.begin(row, grammar, prompt_length)
        if self._processor is not None:
            self._processor.begin(row, processors)

    def end(self, row: int) -> None:
        """Leave out the rules and the grammar of a row whose sequence has ended."""
        self._rules.end(row)
        self._grammars.end(row)

    def advance(self, seen: Seen) -> bool:
        """Take up the texts as a step finds them; return whether the host reads its tree: see ``lay_out``."""
        self._grammars.advance(seen)
        return self._grammars.is_active

    def lay_out(self, seen: Seen, tree: TokenTree, most_nodes: int) -> None:
        """Make the masks of a tree for ``target``, in memory for ``most_nodes`` or more, where the host reads trees."""
        if self._grammars.is_active:
            self._grammars.lay_out(seen.lengths, tree, most_nodes)

    def first(self, texts: Texts, rows: Tensor, logits: Tensor) -> Tensor:
        """Process float[count, vocab] logits of what follows the prompts of int64[count] rows."""
        ruled = self._rules.first(texts.tokens, rows, texts.lengths[rows], logits)
        logits = self._by_grammar(partial(self._grammars.first, rows), ruled, logits)
        if self._processor is None:
            return logits
        nodes = []
        if self._processor.looks_at_text:
            places = zip(rows.tolist(), texts.lengths[rows].tolist(), strict=True)
            nodes = [Node(row, texts.tokens[row, :length]) for row, length in places]
        return self._processor(nodes, logits.clone()).to(logits)

    def target(self, seen: Seen, tree: TokenTree, logits: Tensor) -> Tensor:
        """Process the target's logits, float[batch, n, vocab], of trees that begin with the pending tokens.

        Trees that the host reads were laid out by ``lay_out``.  A node whose token its parent's processed distribution
        excludes is left as it is: the target cannot accept it, so the processor is not called with a text that it has
        excluded.
        """
        ruled = self._rules(seen.tokens, seen.lengths, tree, logits)
        logits = self._by_grammar(self._grammars.verified, ruled, logits)
        if self._processor is None:
            return logits
        return _process(self._processor, self._stops, seen.tokens, seen.lengths, tree, logits, is_target=True)

    def _by_grammar(self, masked: Callable[[Tensor], Tensor], ruled: Tensor, logits: Tensor) -> Tensor:
        """Mask logits that the rules have changed; mask the unchanged ones where no token of a grammar is left."""
        found = masked(ruled)
        if not (self._grammars.is_active and self._rules.parts):
            return found
        return torch.where(_leaves_none(found)[..., None], masked(logits).to(found), found)

    def draft(self, seen: Seen) -> TreeProcessor:
        """Return what processes a draft model's logits; they stay its own where no token would be left."""
        processor, stops, rules, grammars = self._processor, self._stops, self._rules, self._grammars

        def process(tree: TokenTree, logits: Tensor) -> Tensor:
            own = logits
            if rules.parts:
                logits = _unless_none_is_left(rules(seen.tokens, seen.lengths - 1, tree, logits), logits)
            if grammars.is_active:
                masked = self._by_grammar(partial(grammars.drafted, seen.lengths - 1, tree), logits, own)
                logits = _unless_none_is_left(masked, logits)
            if processor is None:
                return logits
            return _process(processor, stops, seen.tokens, seen.lengths - 1, tree, logits, is_target=False)

        return process

    def forced(self) -> list[list[int]]:
        """Return the tokens that certainly follow the pending token of each row; empty lists where none is certain."""
        return self._grammars.forced()

    def refuse_ends(self, logits: Tensor, rows: Tensor) -> None:
        """Refuse texts of int64[count] rows after which float[count, vocab] logits, processed, exclude every token.

        Raises:
            ValueError: there is one.
        """
        self._refuse(rows[_leaves_none(logits)])

    def refuse_path_ends(self, logits: Tensor, path: Tensor, lengths: Tensor) -> None:
        """Likewise for the nodes of trees that are kept: the first int32[batch] of int32[batch, m] paths.

        Raises:
            ValueError: there is one.
        """
        if self._processor is not None:  # rules and grammars leave a token
            is_kept = torch.arange(path.shape[1], device=path.device) < lengths[:, None]
            is_end = (_leaves_none(logits).gather(1, path.clamp(min=0).long()) & is_kept).any(1)
            self._refuse(is_end.nonzero()[:, 0])

    def _refuse(self, rows: Tensor) -> None:
        """Raise where there are rows whose logits exclude every token."""
        if len(rows):
            whose = "the target" if self._processor is None else "the logits processor"
            whose = f"{whose}, or its grammar," if self._grammars.is_active else whose
            raise ValueError(f"{whose} leaves no token to draw in rows {rows.unique().tolist()}")


def _process(
    processor: NodeProcessor, stops: Sequence[frozenset[int]], tokens: Tensor, lengths: Tensor, tree: TokenTree,
    logits: Tensor, *, is_target: bool,
) -> Tensor:  # fmt: skip
    """Process logits along the paths of trees below the first int64[batch] of int64[batch, max_length] tokens.

    Nothing is called behind a stop token: ``stops`` has those of each row.
    """
    if not processor.looks_at_text:
        flat = logits.flatten(0, 1)
        result = processor([], flat).to(flat)
        return (result if is_target else _unless_none_is_left(result, flat)).view_as(logits)
    result, number = logits.clone(), lengths.tolist()
    first = tree.tokens.shape[1] - logits.shape[1]
    depths = torch.where(tree.is_padding, -1, tree.depths)
    has_ended = [[token in own for token in row] for row, own in zip(tree.tokens.tolist(), stops, strict=True)]
    ends = torch.tensor(has_ended, device=depths.device)
    if not is_target:  # a draft's first column is a token of the text, where a prompt may have a stop token
        ends &= depths > 0
    is_reachable = (depths >= 0) & ~ends
    for depth in range(int(depths.max()) + 1):
        rows, columns = ((depths == depth) & is_reachable).nonzero(as_tuple=True)
        if depth:
            above = tree.parents[rows, columns].long()
            has_chance = is_reachable[rows, above]
            if is_target:
                is_drawn = result[rows, above, tree.tokens[rows, columns]] > -torch.inf
                has_chance &= is_drawn | _leaves_none(result[rows, above])
            is_reachable[rows, columns] = has_chance
            rows, columns = rows[has_chance], columns[has_chance]
        rows, columns = rows[columns >= first], columns[columns >= first]
        if not len(rows):
            continue
        paths = tree.ancestor_mask[rows, columns]
        nodes = [
            Node(row, torch.cat([tokens[row, : number[row]], tree.tokens[row, path]]))
            for row, path in zip(rows.tolist(), paths, strict=True)
        ]
        own = logits[rows, columns - first]
        level = processor(nodes, own.clone()).to(own)
        result[rows, columns - first] = level if is_target else _unless_none_is_left(level, own)
    return result


def _leaves_none(logits: Tensor) -> Tensor:
    """Where float[..., vocab] logits exclude every token: bool[...]."""
    return logits.amax(-1) == -torch.inf


def _unless_none_is_left(processed: Tensor, own: Tensor) -> Tensor:
    """Return float[..., vocab] processed logits, and a model's own ones where no token is left."""
    return torch.where(_leaves_none(processed)[..., None], own, processed)
