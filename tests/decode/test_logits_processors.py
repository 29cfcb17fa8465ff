"""Logits processors on trees: each node sees its own path, in target and drafter; nothing else is changed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.tiny_heads import target_and_head
from helpers.tiny_models import VOCAB, patched, path_to, random_texts, random_tree, real_nodes, right_padded, tiny_model
from torch import Tensor

import stree
from stree import Sampling, TokenTree
from stree.decode.logits_processors import LogitsProcessor, Node, RowProcessors, TreeProcessing
from stree.drafters import Draft, HeadDrafter, ModelDrafter, SuffixDrafter
from stree.growth import Chain, Static
from stree.kernels.step.texts import Seen, Texts

CPU = torch.device("cpu")


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


def seen(texts: list[list[int]]) -> Seen:
    """Return texts as a step finds them: the last token of each is pending, and behind it anything may stand."""
    tokens, lengths = right_padded(texts)
    behind = torch.full((len(texts), 4), 77)
    return Seen(torch.cat([tokens, behind], 1), lengths - 1, tokens.gather(1, lengths[:, None] - 1)[:, 0])


def expected_logits(texts: list[list[int]], tree: TokenTree, logits: Tensor) -> Tensor:
    """Add to each node's logits what the text that ends in it gives, node by node."""
    expected, first = logits.clone(), tree.tokens.shape[1] - logits.shape[1]
    for row, text in enumerate(texts):
        for node in (one for one in real_nodes(tree, row) if one >= first):
            whole = [*text, *tree.tokens[row, path_to(tree, row, node)].tolist()]
            expected[row, node - first] = add_text(torch.tensor([whole]), logits[row, node - first])
    return expected


def test_every_node_is_processed_with_the_text_that_ends_in_it() -> None:
    rng, processing = random.Random(3), TreeProcessing(each_node(add_text), 2, VOCAB, CPU)
    for _ in range(3):
        texts, tree = random_texts(rng, [6, 9]), random_tree(rng, [11, 7], 12)
        for row, text in enumerate(texts):
            tree.tokens[row, 0] = text[-1]
        logits = torch.randn(2, 12, VOCAB)
        before, expected = logits.clone(), expected_logits([text[:-1] for text in texts], tree, logits)
        found = processing.target(seen(texts), tree, logits)
        is_real = ~tree.is_padding
        assert torch.equal(found[is_real], expected[is_real]) and torch.equal(logits, before)


@pytest.mark.parametrize("first", [1, 3])
def test_a_draft_model_s_own_tree_begins_with_the_token_before_the_pending_one(first: int) -> None:
    texts = [[5, 6, 7, 8], [9, 1, 2]]
    tokens = torch.tensor([[7, 8, 3, 4, 5], [1, 2, 6, 0, 8]])
    tree = TokenTree(tokens, torch.tensor([[-1, 0, 1, 1, 2], [-1, 0, 1, -1, 2]], dtype=torch.int32))
    process = TreeProcessing(each_node(add_text), 2, VOCAB, CPU).draft(seen(texts))
    logits = torch.randn(2, 5 - first, VOCAB)
    found, expected = process(tree, logits), expected_logits([[5, 6], [9]], tree, logits)
    is_real = ~tree.is_padding[:, first:]
    assert torch.equal(found[is_real], expected[is_real])


def test_first_tokens_are_processed_with_their_prompts() -> None:
    texts = Texts.empty(3, 12, 0, torch.device("cpu"))
    prompts = [[5, 6, 7], [8, 9], [1, 2, 3, 4]]
    for row, prompt in enumerate(prompts):
        texts.tokens[row, : len(prompt)], texts.lengths[row] = torch.tensor(prompt), len(prompt)
    logits = torch.randn(2, VOCAB)
    found = TreeProcessing(each_node(add_text), 2, VOCAB, CPU).first(texts, torch.tensor([1, 0]), logits)
    for place, row in enumerate((1, 0)):
        assert torch.equal(found[place], add_text(torch.tensor([prompts[row]]), logits[place]))


def test_a_processor_is_not_asked_about_a_text_that_it_has_ruled_out() -> None:
    asked: list[list[int]] = []

    def only_even(input_ids: Tensor, logits: Tensor) -> Tensor:
        asked.append(input_ids[0].tolist())
        return logits.masked_fill(torch.arange(VOCAB) % 2 == 1, -torch.inf)

    tree = TokenTree(torch.tensor([8, 3, 2, 4, 10, 11]), torch.tensor([-1, 0, 0, 1, 2, 4], dtype=torch.int32))
    TreeProcessing(each_node(only_even), 1, VOCAB, CPU).target(seen([[4, 6, 8]]), tree, torch.zeros(1, 6, VOCAB))
    assert asked == [[4, 6, 8], [4, 6, 8, 2], [4, 6, 8, 2, 10]]


class LastTokenOnly:
    """A processor of whole levels that looks at no text."""

    looks_at_text = False

    def begin(self, row: int, processors: Sequence[LogitsProcessor]) -> None:
        """Every row has the same one."""

    def __call__(self, nodes: Sequence[Node], logits: Tensor) -> Tensor:
        assert not nodes
        return logits.sort(-1).values


def test_a_processor_that_looks_at_no_text_gets_all_nodes_at_once() -> None:
    processing, tree = TreeProcessing(LastTokenOnly(), 2, VOCAB, CPU), random_tree(random.Random(1), [5, 3], 6)
    present, logits = seen([[1, 2, 3], [4, 5, 6]]), torch.randn(2, 6, VOCAB)
    draft = processing.draft(present)
    assert draft is not None
    for found in (processing.target(present, tree, logits), draft(tree, logits)):
        assert torch.equal(found, logits.sort(-1).values)


def drop_what_occurred(input_ids: Tensor, logits: Tensor) -> Tensor:
    """Forbid every token of the text, so that an unprocessed draft is of little use."""
    return logits.index_fill(1, input_ids[0].unique(), -torch.inf)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7)], ids=["greedy", "sampled"])
def test_the_drafter_is_processed_as_the_target_is(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = patched(tiny_model("mamba2"))
    arguments: dict[str, Any] = {"budget": 5, "max_new_tokens": 30, "sampling": sampling}
    drafter = ModelDrafter(patched(tiny_model("mamba2")))  # the same model: what it drafts is accepted whole
    out = stree.generate(lm, [[5, 6, 7]], drafter, growth=Chain(4), logits_processor=drop_what_occurred, **arguments)
    assert out.stats["tau"] == 5
    assert len(set(out.sequences[0])) == 33

    monkeypatch.setattr(TreeProcessing, "draft", lambda *_: None)  # the processor does not reach the drafter
    control = stree.generate(
        lm, [[5, 6, 7]], drafter, growth=Chain(4), logits_processor=drop_what_occurred, **arguments
    )
    assert control.stats["tau"] < 4


def test_a_draft_head_is_processed_as_the_target_is() -> None:
    lm, head = target_and_head(vocab_size=VOCAB)
    paths: list[list[int]] = []

    class Recorded(HeadDrafter):
        """A drafter that keeps the path to every node that it drafts."""

        def start(self, *arguments: Any) -> Any:
            run = super().start(*arguments)
            propose = run.propose

            def recorded(*arguments: Any) -> Draft:
                tree = (draft := propose(*arguments)).tree
                paths.extend(tree.tokens[0, path_to(tree, 0, node)].tolist() for node in real_nodes(tree, 0)[1:])
                return draft

            run.propose = recorded  # type: ignore[method-assign, assignment]
            return run

    arguments: dict[str, Any] = {"max_new_tokens": 20, "logits_processor": drop_what_occurred}
    out = stree.generate(lm, [[5, 6, 7]], Recorded(head), budget=8, **arguments)
    assert out.sequences == stree.generate(lm, [[5, 6, 7]], budget=1, **arguments).sequences
    assert paths and all(len({5, 6, 7, *path}) == 3 + len(path) for path in paths)


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("drafts", "verifier", "temperature"),
    [("suffix", "auto", 0.8), ("model", "auto", 0.8), ("model", "rejection", 0.8), ("suffix", "auto", 0.0)],
)
def test_a_text_after_which_no_token_is_left_is_refused_where_it_is_reached(
    drafts: str, verifier: str, temperature: float
) -> None:
    lm = patched(tiny_model("mamba2"))
    drafter = SuffixDrafter() if drafts == "suffix" else ModelDrafter(patched(tiny_model("bamba")))
    options: dict[str, Any] = {"budget": 8, "sampling": Sampling(temperature), "verifier": verifier}
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


def test_a_draft_model_keeps_its_own_distribution_where_a_processor_leaves_none() -> None:
    processing, tree = TreeProcessing(each_node(ends_at_six), 1, VOCAB, CPU), TokenTree.chain([5, 0, 3])
    draft = processing.draft(seen([[1, 2, 3, 4, 5]]))
    logits = torch.randn(1, 3, VOCAB)
    assert torch.equal(draft(tree, logits), logits)


def test_infinite_logits_name_a_token_but_are_no_distribution() -> None:
    lm = patched(tiny_model("bamba"))

    def forced(input_ids: Tensor, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor([5]), torch.inf)

    out = stree.generate(lm, [[5, 6, 7]], budget=8, max_new_tokens=4, logits_processor=forced)
    assert out.sequences == [[5, 6, 7, 5, 5, 5, 5]]
    with pytest.raises(ValueError, match="the target's logits are infinite after the prompt"):
        stree.generate(lm, [[5, 6, 7]], sampling=stree.Sampling(0.8), logits_processor=forced)


@pytest.mark.parametrize("drafts", ["none", "suffix", "model"])
def test_no_processor_is_called_with_a_text_behind_its_end(drafts: str) -> None:
    near = tiny_model("mamba2")
    with torch.no_grad():
        near.lm_head.weight.add_(0.01)
    drafter = ModelDrafter(patched(near)) if drafts == "model" else drafts
    prompts = [[5, 6, 7], [3, 8], [9, 9, 2, 5]]
    given: dict[str, Any] = {"stop_token_ids": [8, 9], "max_new_tokens": 12, "budget": 8}

    def constraint(prompt: list[int]) -> LogitsProcessor:
        def few(input_ids: Tensor, logits: Tensor) -> Tensor:
            assert not {8, 9}.intersection(input_ids[0, len(prompt) :].tolist()), "a state machine has no state there"
            allowed = torch.full_like(logits, -torch.inf)
            allowed[:, 2:10] = logits[:, 2:10]
            return allowed

        return few

    each = [constraint(prompt) for prompt in prompts]
    out = stree.generate(patched(tiny_model("mamba2")), prompts, drafter, logits_processor=each, **given)
    assert "stop" in out.stats["finish_reasons"] and len({len(new) for new in out.new_tokens}) > 1
