"""Lookahead decoding in the study emits the text of plain decoding.

Run: python -m pytest tests/scripts/test_lookahead.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.tiny_models import tiny_model

import stree
from benchmarks.studies.lookahead import Shape, chooser, decode
from stree.tree import TokenTree

PROMPT = [5, 6, 7, 5, 6, 7, 5]


class ReadAsChain:
    """A model that reads every tree as a chain: the negative control."""

    def __init__(self, lm: stree.TreeLM) -> None:
        self.new_state, self.prefill, self.commit, self._lm = lm.new_state, lm.prefill, lm.commit, lm

    def verify(self, state: Any, tree: TokenTree) -> torch.Tensor:
        chain = torch.arange(-1, tree.tokens.shape[1] - 1, dtype=torch.int32)[None]
        return self._lm.verify(state, TokenTree.unchecked(tree.tokens, chain))


@pytest.mark.slow
def test_the_text_is_that_of_plain_decoding_in_fewer_steps() -> None:
    lm = stree.TreeLM(tiny_model("mamba2", vocab_size=12).float())
    text, steps, nodes = decode(lm, PROMPT, 24, Shape(4, 3, 4), chooser(0.0, 0))
    plain = stree.generate(lm, [PROMPT], "none", max_new_tokens=len(text), ignore_eos=True).new_tokens[0]
    assert text == list(plain) and steps < len(text) - 1 and nodes <= 17 * steps
    wrong: Any = ReadAsChain(lm)
    assert decode(wrong, PROMPT, 24, Shape(4, 3, 4), chooser(0.0, 0))[0][: len(text)] != text
