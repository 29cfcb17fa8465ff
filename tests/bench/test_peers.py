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


def test_transformers_samples_by_its_own_seed() -> None:
    pair = tiny_pair()
    runs = [run_transformers(pair, [[5, 6, 7]], 8, 1.0, seed)[0] for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
