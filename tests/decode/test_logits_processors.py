"""Logits processors on trees: each node sees its own path, in target and drafter; nothing else is changed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.fast_cases import slow_unless
from helpers.tiny_models import (
    VOCAB,
    as_commit,
    extended,
    patched,
    path_to,
    random_path,
    random_texts,
    random_tree,
    real_nodes,
    right_padded,
    tiny_model,
)
from torch import Tensor
from transformers import LogitsProcessorList

import stree
from stree import Sampling, TokenTree
from stree.decode.logits_processors import LogitsProcessor, Node, RowProcessors, processed
from stree.drafters import Drafter, FusedDrafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.growth import Chain, Static


def each_node(processor: LogitsProcessor) -> RowProcessors:
    """One processor for both rows."""
    rows = RowProcessors()
    for row in range(2):
        rows.begin(row, [processor])
    return rows


def add_text(input_ids: Tensor, logits: Tensor) -> Tensor:
    """Make the logits depend on the length, the order and every token of the text."""
    weights = torch.arange(1, input_ids.shape[1] + 1) * (input_ids[0] + 1)
    return logits + float(weights.sum() % 101)


@pytest.mark.parametrize("is_target", [True, False], ids=["target", "draft"])
def test_every_node_is_processed_with_the_text_that_ends_in_it(is_target: bool) -> None:
    rng, sizes = random.Random(3), [11, 7]
    plain = patched(tiny_model("mamba2"))
    lm = processed(plain, each_node(add_text), is_target=is_target)
    texts = random_texts(rng, [5, 9])
    states = [model.new_state(2, 64, 12) for model in (plain, lm)]
    expected, found = (
        model.prefill(state, *right_padded(texts)) for model, state in zip((plain, lm), states, strict=True)
    )
    for row, text in enumerate(texts):
        assert torch.equal(found[row], add_text(torch.tensor([text]), expected[row]))
    for _ in range(3):
        tree = random_tree(rng, sizes, 12)
        first = rng.choice([0, 3])
        for model, state in zip((plain, lm), states, strict=True):
            model.verify(state, tree)
        expected, found = (model.verify(state, tree, first) for model, state in zip((plain, lm), states, strict=True))
        for row, text in enumerate(texts):
            for node in real_nodes(tree, row):
                whole = torch.tensor([[*text, *tree.tokens[row, path_to(tree, row, node)].tolist()]])
                if node >= first:
                    assert torch.equal(found[row, node - first], add_text(whole, expected[row, node - first]))
        paths = [random_path(rng, tree, row) for row in range(2)]
        for model, state in zip((plain, lm), states, strict=True):
            model.commit(state, *as_commit(paths))
        texts = extended(texts, tree, paths)


def test_a_processor_is_not_asked_about_a_text_that_it_has_ruled_out() -> None:
    asked: list[list[int]] = []

    def only_even(input_ids: Tensor, logits: Tensor) -> Tensor:
        asked.append(input_ids[0].tolist())
        return logits.masked_fill(torch.arange(VOCAB) % 2 == 1, -torch.inf)

    lm = processed(patched(tiny_model("mamba2")), each_node(only_even), is_target=True)
    state = lm.new_state(1, 32, 8)
    lm.prefill(state, torch.tensor([[4, 6]]), torch.tensor([2]))
    lm.verify(
        state, TokenTree(torch.tensor([8, 3, 2, 4, 10, 11]), torch.tensor([-1, 0, 0, 1, 2, 4], dtype=torch.int32))
    )
    assert asked == [[4, 6], [4, 6, 8], [4, 6, 8, 2], [4, 6, 8, 2, 10]]


class LastTokenOnly:
    """A processor of whole levels that looks at no text."""

    looks_at_text = False

    def begin(self, row: int, processors: Sequence[LogitsProcessor]) -> None:
        """Every row has the same one."""

    def __call__(self, nodes: Sequence[Node], logits: Tensor) -> Tensor:
        assert not nodes
        return logits.sort(-1).values


def test_a_processor_that_looks_at_no_text_gets_all_nodes_at_once() -> None:
    plain = patched(tiny_model("mamba2"))
    lm = processed(plain, LastTokenOnly(), is_target=True)
    tree, prompts = random_tree(random.Random(1), [5, 3], 6), torch.tensor([[1, 2, 3], [4, 5, 6]])
    lengths, states = torch.tensor([3, 3]), [plain.new_state(2), lm.new_state(2)]
    assert torch.equal(lm.prefill(states[1], prompts, lengths), plain.prefill(states[0], prompts).sort(-1).values)
    assert torch.equal(lm.verify(states[1], tree), plain.verify(states[0], tree).sort(-1).values)
    assert (lm.vocab_size, lm.device) == (plain.vocab_size, plain.device)


def drop_what_occurred(input_ids: Tensor, logits: Tensor) -> Tensor:
    """Forbid every token of the text, so that an unprocessed draft is of little use."""
    return logits.index_fill(1, input_ids[0].unique(), -torch.inf)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7)], ids=["greedy", "sampled"])
def test_the_drafter_is_processed_as_the_target_is(sampling: Sampling) -> None:
    lm = patched(tiny_model("mamba2"))
    arguments: dict[str, Any] = {"budget": 5, "max_new_tokens": 30, "sampling": sampling}
    drafter = ModelDrafter(patched(tiny_model("mamba2")))  # the same model: what it drafts is accepted whole
    out = stree.generate(lm, [[5, 6, 7]], drafter, growth=Chain(4), logits_processor=drop_what_occurred, **arguments)
    assert out.stats["tau"] == 5
    assert len(set(out.sequences[0])) == 33

    class Unprocessed(ModelDrafter):
        """A drafter whose distributions the processor does not reach."""

        def with_model(self, change: Any) -> ModelDrafter:
            return self

    control = stree.generate(
        lm, [[5, 6, 7]], Unprocessed(drafter.lm), growth=Chain(4), logits_processor=drop_what_occurred, **arguments
    )
    assert control.stats["tau"] < 4


def test_a_processed_text_is_drawn_the_same_way_whatever_the_tree() -> None:
    lm, drafter = patched(tiny_model("bamba")), ModelDrafter(patched(tiny_model("mamba2")))
    arguments: dict[str, Any] = {"max_new_tokens": 20, "sampling": Sampling(0.8), "logits_processor": add_bias}
    prompts = [[5, 6, 7], [3, 4, 2, 9, 9]]
    plain = stree.generate(lm, prompts, budget=1, **arguments).sequences
    for growth in (Chain(3), Static([3, 2]), None):
        assert (
            stree.generate(lm, prompts, drafter, growth=growth, budget=16, verifier="match", **arguments).sequences
            == plain
        )
    arguments["logits_processor"] = None
    assert stree.generate(lm, prompts, budget=1, **arguments).sequences != plain


def add_bias(input_ids: Tensor, logits: Tensor) -> Tensor:
    """Prefer tokens by the last two of the text."""
    preferred = (input_ids[:, -1] * 7 + input_ids[:, -2]) % VOCAB
    return logits.scatter_add(1, preferred[:, None], torch.full((len(logits), 1), 5.0))


def ends_at_six(input_ids: Tensor, logits: Tensor) -> Tensor:
    """Leave no token after six."""
    return torch.full_like(logits, -torch.inf) if input_ids.shape[1] >= 6 else logits


@pytest.mark.parametrize("drafts", ["suffix", "model"])
def test_greedy_text_after_which_no_token_is_left_is_that_of_transformers(drafts: str) -> None:
    model = tiny_model("mamba2")
    expected = model.generate(
        torch.tensor([[1, 2, 3]]), do_sample=False, max_new_tokens=8, pad_token_id=0, eos_token_id=None,
        logits_processor=LogitsProcessorList([ends_at_six]),
    )  # fmt: skip
    drafter = SuffixDrafter() if drafts == "suffix" else ModelDrafter(patched(tiny_model("bamba")))
    out = stree.generate(patched(model), [[1, 2, 3]], drafter, budget=8, max_new_tokens=8, logits_processor=ends_at_six)
    assert out.sequences == expected.tolist() and out.sequences[0][-5:] == [0] * 5


@pytest.mark.parametrize(("drafts", "verifier"), [("suffix", "auto"), ("model", "auto"), ("model", "rejection")])
def test_a_sampled_text_after_which_no_token_is_left_is_refused_where_it_is_reached(drafts: str, verifier: str) -> None:
    lm = patched(tiny_model("mamba2"))
    drafter = SuffixDrafter() if drafts == "suffix" else ModelDrafter(patched(tiny_model("bamba")))
    options: dict[str, Any] = {"budget": 8, "sampling": Sampling(0.8), "verifier": verifier}
    with pytest.raises(stree.GenerationError, match=r"leaves no token to draw in rows \[0\]") as caught:
        stree.generate(lm, [[1, 2, 3]], drafter, max_new_tokens=8, logits_processor=ends_at_six, **options)
    reached = caught.value.output.sequences[0]
    assert 3 < len(reached) <= 6
    out = stree.generate(lm, [[1, 2, 3]], drafter, max_new_tokens=3, logits_processor=ends_at_six, **options)
    assert out.sequences[0][: len(reached)] == reached, "a text that ends before it is none of them"
    with pytest.raises(ValueError, match="leaves no token to draw"):
        stree.generate(lm, [[1, 2, 3, 4, 5, 6]], drafter, logits_processor=ends_at_six, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_processor_may_return_another_dtype(dtype: torch.dtype) -> None:
    lm, drafter = patched(tiny_model("mamba2")), ModelDrafter(patched(tiny_model("bamba")))
    found, expected = (
        stree.generate(lm, [[1, 2, 3]], drafter, budget=8, max_new_tokens=8, logits_processor=processor).sequences
        for processor in (lambda _, logits: logits.to(dtype), lambda _, logits: logits.to(dtype).float())
    )
    assert found == expected


@pytest.mark.parametrize(
    ("drafts", "temperature"),
    slow_unless(
        lambda *case: case in (("suffix", 0.8), ("model", 0.0)),
        itertools.product(("none", "suffix", "model", "fused"), (0.0, 0.8)),
    ),
)
def test_processed_texts_do_not_depend_on_the_number_of_slots(drafts: str, temperature: float) -> None:
    lm, model = patched(tiny_model("mamba2")), ModelDrafter(patched(tiny_model("bamba")))
    every: dict[str, Drafter] = {"none": NoDrafter(), "suffix": SuffixDrafter(), "model": model}
    drafter = FusedDrafter(model, SuffixDrafter()) if drafts == "fused" else every[drafts]
    texts = random_texts(random.Random(0), [5, 3, 1, 7, 4])

    def generated(max_batch: int | None) -> list[list[int]]:
        return stree.generate(
            lm, texts, drafter, budget=8, max_new_tokens=12, max_batch=max_batch, sampling=Sampling(temperature),
            logits_processor=add_by_text,
        ).sequences  # fmt: skip

    def add_by_text(input_ids: Tensor, logits: Tensor) -> Tensor:
        """Make a token likely that all of the text decides on."""
        weights = torch.arange(1, input_ids.shape[1] + 1) * (input_ids[0] + 1)
        logits = logits.clone()
        logits[0, int(weights.sum()) % VOCAB] += 3.0
        return logits

    together = generated(None)
    assert generated(2) == together and generated(1) == together


def test_a_draft_model_keeps_its_own_distribution_where_a_processor_leaves_none() -> None:
    plain = patched(tiny_model("mamba2"))
    lm, tree = processed(plain, each_node(ends_at_six), is_target=False), TokenTree.chain([1, 2, 3])
    states = [model.new_state(1, 64, 4) for model in (plain, lm)]
    for model, state in zip((plain, lm), states, strict=True):
        model.prefill(state, torch.tensor([[1, 2, 3, 4]]), torch.tensor([4]))
    expected, found = (model.verify(state, tree) for model, state in zip((plain, lm), states, strict=True))
    assert torch.equal(expected, found)
