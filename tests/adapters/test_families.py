"""Every family: trees are exact, verify has no side effect, patches leave the model unchanged, nodes do not mix.

Test ids are transformers' model types.  The oracle is always an unpatched copy's own forward.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers.family_states import advanced, prefilled, rebind_float32
from helpers.tiny_family_models import FAMILIES, ROUTED, family_model, matrix
from helpers.tiny_models import (
    TOLERANCE,
    as_commit,
    extended,
    fresh_logits,
    fresh_node_logits,
    patched,
    path_to,
    random_path,
    random_texts,
    random_tree,
    real_nodes,
    relative_error,
    right_padded,
    tree_error,
)
from transformers import PreTrainedModel

from stree import TokenTree
from stree.models.families import FAMILIES as SUPPORTED

FLOAT32 = TOLERANCE[torch.float32]


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    chosen: torch.dtype = request.param
    if chosen == torch.float64:
        rebind_float32(monkeypatch)
    return chosen


def test_every_supported_family_is_tested() -> None:
    assert sorted(SUPPORTED) == FAMILIES


@pytest.mark.parametrize("family", matrix())
def test_three_trees_with_two_commits_between_are_exact(family: str, dtype: torch.dtype) -> None:
    rng = random.Random(0)
    model = family_model(family, dtype)
    lm, texts = patched(model), random_texts(rng, [17, 3, 9])
    state = lm.new_state(3, 64, 16)
    logits = lm.prefill(state, *right_padded(texts))
    for row, text in enumerate(texts):
        assert relative_error(logits[row], fresh_logits(model, text)[-1]) < TOLERANCE[dtype]
    for step in range(3):
        tree = random_tree(rng, [13, 5, 8])
        logits = lm.verify(state, tree)
        assert logits.dtype == dtype
        assert tree_error(model, texts, tree, logits) < TOLERANCE[dtype]
        if step < 2:
            paths = [random_path(rng, tree, 0), path_to(tree, 1, real_nodes(tree, 1)[-1]), [[0], []][step]]
            lm.commit(state, *as_commit(paths))
            texts = extended(texts, tree, paths)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64], indirect=True, ids=["float64"])
@pytest.mark.parametrize("family", matrix())
def test_trees_of_64_nodes_after_many_commits_are_exact(family: str, dtype: torch.dtype) -> None:
    rng = random.Random(14)
    model = family_model(family, dtype, seed=1)
    lm, texts = patched(model), random_texts(rng, [33, 1, 12])
    state = lm.new_state(3, 512, 64)
    lm.prefill(state, *right_padded(texts))
    for _ in range(12):
        tree = random_tree(rng, [6, 9, 4])
        lm.verify(state, tree)
        paths = [random_path(rng, tree, row) for row in range(3)]
        lm.commit(state, *as_commit(paths))
        texts = extended(texts, tree, paths)
    tree = random_tree(rng, [64, 40, 64])
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < TOLERANCE[dtype]


@pytest.mark.parametrize("family", matrix())
def test_verifying_twice_is_bit_equal_and_a_tree_may_be_one_node(family: str) -> None:
    rng = random.Random(1)
    model = family_model(family)
    lm = patched(model)
    state, texts = advanced(lm, rng, [6, 9])
    for size in (1, 11):
        tree = random_tree(rng, [size, size])
        once = lm.verify(state, tree)
        lm.verify(state, random_tree(rng, [14, 12]))
        assert torch.equal(once, lm.verify(state, tree))
        assert tree_error(model, texts, tree, once) < FLOAT32


@pytest.mark.parametrize("family", matrix())
def test_no_memory_is_read_before_it_is_written(family: str, request: pytest.FixtureRequest) -> None:
    rng = random.Random(9)
    model = family_model(family)
    lm = patched(model)
    request.getfixturevalue("poisoned_empty")  # from here on; transformers makes its weights with torch.empty
    state, texts = advanced(lm, rng, [2, 9])
    tree = random_tree(rng, [6, 9])
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < FLOAT32


@pytest.mark.parametrize("family", matrix(sorted({*FAMILIES} - ROUTED)))
def test_in_bfloat16_a_tree_is_as_exact_as_the_model_itself(family: str) -> None:
    rng = random.Random(10)
    model = family_model(family, torch.bfloat16)
    lm = patched(model)
    state, texts = advanced(lm, rng, [9])
    tree = random_tree(rng, [9])
    exact = fresh_node_logits(family_model(family, torch.bfloat16).float(), texts[0], tree, 0)

    def error(logits: torch.Tensor) -> float:
        return float((logits.float() - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())

    # Measured over three seeds: at most 2.0 times the error of transformers' own bfloat16 forward.
    assert error(lm.verify(state, tree)[0]) < 2.5 * error(fresh_node_logits(model, texts[0], tree, 0)) + 0.01


@pytest.mark.parametrize("family", matrix())
def test_a_tree_may_grow_piece_by_piece(family: str) -> None:
    rng = random.Random(2)
    model = family_model(family)
    lm = patched(model)
    state, texts = advanced(lm, rng, [5, 11])
    tree = random_tree(rng, [14, 9])
    pieces, first = [], 0
    for end in (1, 2, 7, 14):
        part = TokenTree(tree.tokens[:, :end], tree.parents[:, :end])
        pieces.append(lm.verify(state, part, first=first))
        first = end
    assert tree_error(model, texts, tree, torch.cat(pieces, 1)) < FLOAT32
    paths = [path_to(tree, row, real_nodes(tree, row)[-1]) for row in range(2)]
    lm.commit(state, *as_commit(paths))
    texts = extended(texts, tree, paths)
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < FLOAT32


@pytest.mark.parametrize("family", matrix())
def test_one_token_decoding_by_transformers_agrees(family: str) -> None:
    rng = random.Random(3)
    model = family_model(family)
    lm, (text,) = patched(model), random_texts(rng, [7])
    state = prefilled(lm, [text])
    # What transformers' own generate computes along a text is forced by a processor that allows one token a step.
    rest = random_texts(rng, [6])[0]
    forced = _decoded_logits(model, text, rest)
    for place, token in enumerate(rest):
        logits = lm.verify(state, TokenTree.chain(torch.tensor([[token]])))
        if place + 1 < len(rest):
            assert relative_error(logits[0, 0], forced[place + 1]) < FLOAT32
        lm.commit(state, *as_commit([[0]]))


def _decoded_logits(model: PreTrainedModel, text: list[int], rest: list[int]) -> list[torch.Tensor]:
    """Let ``model.generate`` decode one token at a time along a given text; list the raw logits of every step."""

    def allowed(_: int, tokens: torch.Tensor) -> list[int]:
        return [rest[len(tokens) - len(text)]]

    out: Any = model.generate(
        torch.tensor([text]),
        max_new_tokens=len(rest),
        do_sample=False,
        prefix_allowed_tokens_fn=allowed,
        eos_token_id=[],
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert out.sequences[0].tolist() == text + rest
    return [logits[0] for logits in out.logits]


@pytest.mark.parametrize("family", matrix())
def test_plain_generate_of_a_patched_model_is_bit_equal(family: str) -> None:
    model = family_model(family)
    lm = patched(model)
    (text, other) = random_texts(random.Random(4), [9, 9])
    state = prefilled(lm, [text])
    tree = random_tree(random.Random(4), [8])
    before = lm.verify(state, tree)
    mask = torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
    outputs: list[Any] = []
    for one in (model, lm.model):
        outputs.append(
            one.generate(
                torch.tensor([[0] * 4 + text[4:], other]),
                attention_mask=mask,
                max_new_tokens=4,
                min_new_tokens=4,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        )
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert all(torch.equal(a, b) for a, b in zip(outputs[0].logits, outputs[1].logits, strict=True))
    assert torch.equal(before, lm.verify(state, tree))  # nor does the plain call touch a state of ours


@pytest.mark.parametrize("family", matrix())
def test_no_node_depends_on_what_is_not_its_ancestor(family: str, dtype: torch.dtype) -> None:
    rng = random.Random(5)
    lm = patched(family_model(family, dtype))
    state, _ = advanced(lm, rng, [6, 6, 6])
    tokens = torch.tensor(random_texts(rng, [9, 9, 9]))
    parents = torch.tensor([[-1, 0, 0, 1, 2, 1, 4, 3, 4]] * 3, dtype=torch.int32)
    reference = lm.verify(state, TokenTree(tokens, parents))
    changed = tokens.clone()
    changed[1:] = (changed[1:] + 41) % 97  # other sequences
    changed[0, [2, 4, 6, 8]] = (changed[0, [2, 4, 6, 8]] + 41) % 97  # the other branch of the root, but for node 6
    kept = [0, 1, 3, 5, 7]
    logits = lm.verify(state, TokenTree(changed, parents))
    # Experts get other numbers of rows; on the CPU every family was bit-equal all the same.
    assert relative_error(logits[0, kept], reference[0, kept]) < 1e-6
    assert relative_error(logits[0, [2, 4]], reference[0, [2, 4]]) > 1000 * FLOAT32
    order = [0, 2, 4, 8, 1, 6, 5, 3, 7]  # the same tree, its nodes in another topological order
    place = {node: index for index, node in enumerate(order)}
    moved = torch.tensor([[-1, *(place[int(parents[0, node])] for node in order[1:])]] * 3, dtype=torch.int32)
    logits = lm.verify(state, TokenTree(tokens[:, order], moved))
    assert relative_error(logits, reference[:, order]) < TOLERANCE[dtype] / 10  # sums run in another order


@pytest.mark.parametrize("family", matrix())
def test_control_a_tree_read_as_a_chain_or_a_lost_state_is_far_off(family: str) -> None:
    rng = random.Random(6)
    model = family_model(family)
    lm = patched(model)
    state, texts = advanced(lm, rng, [12])
    tree = random_tree(rng, [12])
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < FLOAT32
    assert tree_error(model, texts, tree, lm.verify(state, TokenTree.chain(tree.tokens))) > 1000 * FLOAT32
    for spec, stack in state.stacks.items():
        names = [name for name, _ in stack.sequence_tensors() if not name.startswith("stash")]
        assert names, f"{spec} holds nothing"
        for name in names:
            broken = state.clone()
            getattr(broken.stacks[spec], name).zero_()
            assert tree_error(model, texts, tree, lm.verify(broken, tree)) > 1000 * FLOAT32, f"{name} of {spec}"
