"""Memory of a step's logits: token rules, accepting tokens, the logits of accepted paths, and log probabilities."""

from __future__ import annotations

from collections.abc import Collection

import torch

from stree.decode.batch_token_rules import BatchTokenRules
from stree.decode.token_rules import TokenRules
from stree.models.peak_bytes import peak_bytes
from stree.tree import TokenTree

__all__ = ["accept_bytes", "logprob_bytes", "rule_bytes"]

INT64 = 8  # bytes, and those of a float64


def accept_bytes(dtype: torch.dtype, *, is_greedy: bool, truncates: bool, verifier_bytes: int) -> int:
    """Return the bytes of a token of one node's logits in a step, and of what accepting tokens makes of them.

    Args:
        dtype: of the weights.
        is_greedy: whether no token is sampled.
        truncates: whether top-k, top-p or min-p may exclude tokens.
        verifier_bytes: that the verifier holds beside probabilities.
    """
    weights = dtype.itemsize
    wide = max(4, weights)
    if is_greedy:
        return wide + weights * (weights < 4)  # as computed, and in float32
    if truncates:
        return 3 * wide + 3 * INT64 + 1  # divided and sorted; their places, two of the sums; a mask
    return 2 * wide + verifier_bytes  # with their probabilities


def rule_bytes(rules: Collection[TokenRules], batch: int, nodes: int, vocab_size: int, length: int) -> tuple[int, int]:
    """Return the bytes that token rules keep, and the most that they hold in a step beside float32 logits.

    They are run on tensors without values.

    Args:
        rules: of the texts; each text takes the operations of all.
        batch: texts.
        nodes: of each tree.
        vocab_size: of the logits.
        length: most tokens of a text.
    """
    kept: list[BatchTokenRules] = []

    def run() -> None:
        kept.append(BatchTokenRules(batch, vocab_size, meta))
        for own in {(own.parts, *own.words_shape): own for own in rules}.values():
            kept[0].begin(0, own, 1)
        kept[0](tokens, lengths, tree, logits)

    if not rules:
        return 0, 0
    meta = torch.device("meta")
    with meta, torch.no_grad():
        tokens, lengths = torch.zeros(batch, length, dtype=torch.long), torch.zeros(batch, dtype=torch.long)
        columns, mask = torch.zeros(batch, nodes, dtype=torch.long), torch.ones(batch, nodes, nodes, dtype=torch.bool)
        tree = TokenTree.unchecked(columns, columns.int(), columns.int(), mask)
        logits = torch.empty(batch, nodes, vocab_size)
        peak = peak_bytes(run)
    return kept[0].num_bytes, peak


def logprob_bytes(path_length: int, vocab_size: int, *, has_rules: bool) -> tuple[int, int]:
    """Return the bytes of a text's path logits in a step, and of those with the log probabilities behind it.

    Args:
        path_length: most nodes of an accepted path.
        vocab_size: of the logits.
        has_rules: whether the logits before the rules are kept, too.
    """
    logits = 4 * path_length * vocab_size
    return (1 + has_rules) * logits, (2 + has_rules) * logits
