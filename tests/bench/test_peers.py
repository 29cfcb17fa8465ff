"""Other libraries' own generation."""

from __future__ import annotations

from helpers.tiny_pairs import tiny_pair

from stree.bench.peers import run_transformers


def test_transformers_generates_ragged_prompts_as_it_does_each_alone() -> None:
    pair = tiny_pair()
    prompts = [list(range(5, 12)), [20, 21]]
    together, first = run_transformers(pair, prompts, 6, 0.0, 0)
    assert first is None  # its streamers take one prompt
    for prompt, tokens in zip(prompts, together, strict=True):
        alone, first = run_transformers(pair, [prompt], 6, 0.0, 0)
        assert alone == [tokens] and first is not None and first > 0
