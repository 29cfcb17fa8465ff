"""Pairs and triples of the tokens of a text are remembered in Triton and on the CPU as in torch.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_tree_growth_memory.py
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stree.kernels.dispatch import as_on_device

pytest.importorskip("triton")

from stree.kernels.tree_growth import api, cpu_ratings, reference
from stree.kernels.tree_growth.operands import NUM_PLACES, Memory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@given(seed=st.integers(0, 10**6), batch=st.integers(1, 4), m=st.integers(1, 20))
@example(seed=26731, batch=4, m=17)  # two triples of one place
@settings(max_examples=10, deadline=None)
def test_a_text_is_read_token_by_token(seed: int, batch: int, m: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    memories = [Memory.empty(batch, DEVICE) for _ in range(3)]
    texts: list[list[int]] = [[] for _ in range(batch)]
    for _ in range(3):
        tokens = torch.randint(9, (batch, m + 3), generator=generator)
        path = torch.randint(-1, m + 3, (batch, 2 * m), generator=generator, dtype=torch.int32)[:, :m]
        lengths = torch.randint(m + 1, (batch,), generator=generator, dtype=torch.int32)
        path = torch.where(torch.arange(m) < lengths[:, None], path.clamp(min=0), path)
        for row, length in enumerate(lengths.tolist()):
            texts[row] += tokens[row, path[row, :length].long()].tolist()
        given_tensors = [part.to(DEVICE) for part in (tokens, path, lengths)]
        reference.remember(memories[0], *given_tensors)
        with as_on_device(host_can_read=True):
            api.remember(memories[1], *given_tensors)
        if DEVICE.type == "cpu":
            cpu_ratings.remember(memories[2], *given_tensors)
    one, *others = memories[: 3 if DEVICE.type == "cpu" else 2]
    count = 2 * NUM_PLACES  # the last place is unused
    for other in others:
        assert torch.equal(one.places[:, :count], other.places[:, :count]) and torch.equal(one.last, other.last)
    for row, text in enumerate(texts):
        assert one.last[row].tolist() == [-1, -1, *text][-2:]
        pairs, triples = zip(text, text[1:], strict=False), zip(text, text[1:], text[2:], strict=False)
        expected = {place_of(*pair) for pair in pairs} | {NUM_PLACES + place_of(*triple) for triple in triples}
        assert one.places[row, :count].nonzero().flatten().tolist() == sorted(expected)


def place_of(*tokens: int) -> int:
    """Hash tokens, the last of them first, in plain integers."""
    number = sum(
        token * factor for token, factor in zip(tokens[::-1], (0x05EBCA77, 0x1E3779B1, 0x27D4EB2F), strict=False)
    )
    return (number ^ (number >> 17)) % NUM_PLACES


def test_pairs_and_triples_of_a_large_vocabulary_hardly_meet() -> None:
    memory = Memory.empty(1, DEVICE)
    text = torch.randint(200_000, (1, 20_000), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    reference.remember(memory, text, None, torch.tensor([20_000], device=DEVICE, dtype=torch.int32))
    for half in range(2):
        taken = int(memory.places[0, half * NUM_PLACES : (half + 1) * NUM_PLACES].sum())
        expected = NUM_PLACES * (1 - (1 - 1 / NUM_PLACES) ** 20_000)  # of places taken at random
        assert taken == pytest.approx(expected, rel=0.01)
