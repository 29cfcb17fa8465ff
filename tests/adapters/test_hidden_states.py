"""Hidden states of named layers at every token and node, against those that transformers' fresh forward returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers.captured import TapeRecorder
from helpers.family_states import Decoding
from helpers.on_device import treat_as_on_device
from helpers.tiny_family_models import family_model, matrix
from helpers.tiny_models import (
    TOLERANCE,
    patched,
    path_to,
    random_texts,
    random_tree,
    real_nodes,
    relative_error,
    right_padded,
    tiny_model,
)
from torch import Tensor

from stree import TokenTree, TreeLM


@torch.no_grad()
def fresh_hidden(model: Any, text: Sequence[int]) -> Tensor:
    """Run a whole text without a cache: [length, layers + 2, hidden_size], the output of the final norm at the end."""
    last: list[Any] = []
    with model.base_model.layers[-1].register_forward_hook(lambda _, __, out: last.append(out)):
        out = model(torch.tensor([list(text)]), use_cache=False, output_hidden_states=True)
    *layers, normed = out.hidden_states
    if model.config.model_type in ("mamba", "mamba2", "falcon_mamba"):  # theirs begin after the first layer
        layers = [model.get_input_embeddings()(torch.tensor([list(text)])), *layers[:-1]]
    before_norm = last[0][0] if isinstance(last[0], tuple) else last[0]
    return torch.stack([*layers, before_norm, normed], dim=2)[0]


def every_layer(lm: TreeLM) -> list[int]:
    return [*range(lm.num_layers + 1), -1]


def text_error(decoding: Decoding, hidden: Tensor, begins: Sequence[int]) -> float:
    """Return the largest error at the tokens from ``begins`` on, a layer at a time."""
    errors = []
    for row, (text, begin) in enumerate(zip(decoding.texts, begins, strict=True)):
        expected = fresh_hidden(decoding.model, text)[begin:]
        for layer in range(expected.shape[1] if len(expected) else 0):
            errors.append(relative_error(hidden[row, : len(expected), layer], expected[:, layer]))
    return max(errors)


def tree_error(decoding: Decoding, tree: TokenTree, hidden: Tensor, first: int = 0) -> float:
    """Return the largest error at the nodes from ``first`` on, a layer at a time."""
    errors = []
    for row, text in enumerate(decoding.texts):
        for node in (node for node in real_nodes(tree, row) if node >= first):
            path = tree.tokens[row, path_to(tree, row, node)].tolist()
            expected = fresh_hidden(decoding.model, [*text, *path])[-1]
            for layer in range(len(expected)):
                errors.append(relative_error(hidden[row, node - first, layer], expected[layer]))
    return max(errors)


@pytest.mark.parametrize("family", matrix(fast=("jamba", "lfm2")))
def test_every_layer_equals_transformers_in_each_call(family: str, dtype: torch.dtype) -> None:
    decoding = Decoding(family_model(family, dtype), [0, 0, 0], max_nodes=7)
    lm, tolerance, layers = decoding.lm, TOLERANCE[dtype], every_layer(decoding.lm)
    decoding.texts = random_texts(decoding.rng, [11, 2, 5])
    for chunk_size in (None, 4):
        lm.chunk_size = chunk_size
        state = lm.new_state(3, 64, 7)
        tokens = right_padded(decoding.texts)
        logits, hidden = lm.prefill(state, *tokens, hidden_layers=layers)
        assert torch.equal(logits, lm.prefill(lm.new_state(3, 64, 7), *tokens))
        assert hidden.shape == (3, 11, len(layers), lm.model.config.hidden_size) and hidden.dtype == dtype
        assert text_error(decoding, hidden, [0, 0, 0]) < tolerance
    decoding = decoding.held_by(state)
    tree = decoding.tree([7, 4, 6])
    logits, hidden = lm.verify(state, tree, hidden_layers=layers)
    assert torch.equal(logits, lm.verify(state, tree))
    assert tree_error(decoding, tree, hidden) < tolerance
    lm.verify(state, TokenTree(tree.tokens[:, :2], tree.parents[:, :2]))
    _, hidden = lm.verify(state, tree, first=2, hidden_layers=[*reversed(layers)])
    assert tree_error(decoding, tree, hidden.flip(2), first=2) < tolerance
    decoding.commit(tree, [[0], [], path_to(tree, 2, real_nodes(tree, 2)[-1])])
    begins, more = [*map(len, decoding.texts)], random_texts(decoding.rng, [9, 1, 0])
    decoding.texts = [text + new for text, new in zip(decoding.texts, more, strict=True)]
    _, hidden = lm.extend(state, *right_padded(more), hidden_layers=layers)
    assert hidden.shape[:2] == (3, 9) and text_error(decoding, hidden, begins) < tolerance


@pytest.mark.parametrize("family", matrix(fast=(), in_ci=("kimi_linear",)))
def test_fused_layers_change_no_hidden_states(family: str, launched: Counter[str]) -> None:
    results = []
    for is_fused in (False, True):
        decoding = Decoding(family_model(family), [9, 4])
        decoding.lm.fused_layers = is_fused
        tree = decoding.tree([7, 7])
        launched.clear()
        results.append(decoding.lm.verify(decoding.state, tree, hidden_layers=every_layer(decoding.lm)))
    assert launched["rms_norm"]
    for unfused, fused in zip(results[0][1].unbind(2), results[1][1].unbind(2), strict=True):
        assert relative_error(fused, unfused) < 2e-5


def test_hidden_states_cost_no_launch_of_a_fused_layer(launched: Counter[str]) -> None:
    decoding, counts = Decoding(tiny_model("bamba"), [9]), []
    tree = decoding.tree([7])
    for layers in (None, every_layer(decoding.lm)):
        launched.clear()
        if layers is None:
            decoding.lm.verify(decoding.state, tree)
        else:
            decoding.lm.verify(decoding.state, tree, hidden_layers=layers)
        counts.append(dict(launched))
    assert counts[0]["rms_norm_add"] and counts[0] == counts[1]


def test_a_captured_step_replays_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    treat_as_on_device(monkeypatch)
    lm, recorder = patched(tiny_model("bamba")), TapeRecorder()
    decoding = Decoding(tiny_model("bamba"), [9, 4], lm=lm, fixed_shapes=True)
    tree = random_tree(decoding.rng, [7, 7])
    static = TokenTree.unchecked(tree.tokens.clone(), tree.parents.clone(), tree.depths, tree.ancestor_mask)

    def work() -> tuple[Tensor, Tensor]:
        return lm.verify(decoding.state, static, hidden_layers=[1, -1])

    work()
    graph, (_, hidden) = recorder.capture(work)
    for tokens in (tree.tokens, (tree.tokens + 5) % 97):
        static.tokens.copy_(tokens)
        graph.replay()
        _, expected = lm.verify(decoding.state, TokenTree(tokens, tree.parents), hidden_layers=[1, -1])
        assert torch.equal(hidden, expected)


def test_threads_that_ask_for_different_layers_get_theirs() -> None:
    lm = patched(tiny_model("bamba"))
    lm.chunk_size = 3
    tokens = torch.tensor(random_texts(Decoding(tiny_model("bamba"), [1]).rng, [12, 12]))

    def run(layer: int) -> Tensor:
        hidden = lm.prefill(lm.new_state(2, 32, 8), tokens, hidden_layers=[layer])[1]
        lm.prefill(lm.new_state(2, 32, 8), tokens)
        return hidden

    layers = [0, 1, 2, 3, -1] * 2
    with ThreadPoolExecutor(len(layers)) as pool:
        found = [*pool.map(run, layers)]
    assert all(map(torch.equal, found, map(run, layers)))


@pytest.mark.parametrize("family", ["mamba2", "llama"])
def test_hidden_states_are_what_hooks_of_the_layers_have_made_of_them(family: str) -> None:
    model, lm = tiny_model(family), patched(tiny_model(family))
    for one in (model, lm.model):
        one.base_model.layers[0].register_forward_hook(lambda _, __, out: out + 0.5)
    decoding = Decoding(model, [5], lm=lm)
    tree = decoding.score([4])
    assert tree_error(decoding, tree, lm.verify(decoding.state, tree, hidden_layers=every_layer(lm))[1]) < 1e-4


def test_prompts_that_run_row_by_row_and_one_for_a_row_have_hidden_states() -> None:
    decoding = Decoding(tiny_model("mamba2", use_bias=True), [0, 0])
    lm, state, layers = decoding.lm, decoding.state, every_layer(decoding.lm)
    decoding.texts = random_texts(decoding.rng, [3, 8])
    assert (
        text_error(decoding, lm.prefill(state, *right_padded(decoding.texts), hidden_layers=layers)[1], [0, 0]) < 1e-4
    )
    decoding.texts = decoding.texts[1:]
    assert (
        text_error(decoding, lm.prefill_row(state, 0, torch.tensor(decoding.texts), hidden_layers=layers)[1], [0])
        < 1e-4
    )


@pytest.mark.parametrize("layers", [[], [4], [-2], [0, 1.0], [0, None]], ids=str)
def test_layers_that_a_model_does_not_have_are_refused_before_anything_runs(layers: Any) -> None:
    decoding = Decoding(tiny_model("bamba"), [4])
    lm, tokens, tree = decoding.lm, torch.tensor([[1, 2]]), decoding.score([5])
    calls: list[Callable[[], object]] = [
        lambda: lm.prefill(lm.new_state(), tokens, hidden_layers=layers),
        lambda: lm.extend(decoding.state, tokens, hidden_layers=layers),
        lambda: lm.verify(decoding.state, tree, hidden_layers=layers),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"hidden_layers must be integers from 0, the embeddings, to 3, the last"):
            call()
    decoding.commit(tree, [[0]])
    decoding.score([5])


def test_hidden_states_have_the_dtype_of_the_model() -> None:
    lm = patched(tiny_model("mamba2", torch.bfloat16))
    assert lm.prefill(lm.new_state(1, 16, 4), torch.tensor([[1, 2]]), hidden_layers=[0, 2])[1].dtype == torch.bfloat16
