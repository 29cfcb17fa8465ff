"""A draft model with a trimmed head: probabilities, stop tokens, and generated texts, which do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_models import FAMILIES, VOCAB, patched, right_padded, tiny_model

import stree
from stree.drafters import ModelDrafter
from stree.growth import DySpec
from stree.models.trimmed import TrimmedLM
from stree.sampling import Sampling
from stree.vocabulary import load_vocabulary, most_frequent, save_vocabulary

KEPT = [0, 3, 5, 8, 13, 21, 34, 55, 89]


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_tokens_have_their_logits_and_the_others_none(family: str) -> None:
    lm = patched(tiny_model(family))
    trimmed = TrimmedLM(lm, KEPT[::-1])
    assert trimmed.vocab_size == lm.vocab_size == VOCAB
    ids, lengths = right_padded([[3, 1, 4, 1], [5, 9]])
    tree = stree.TokenTree.from_paths([[1, 2], [1, 3]])
    tree = stree.TokenTree(tree.tokens.repeat(2, 1), tree.parents.repeat(2, 1))
    results = []
    for model in (lm, trimmed):
        state = model.new_state(2, 32, 8)
        results.append((model.prefill(state, ids, lengths), model.verify(state, tree)))
    left_out = torch.ones(VOCAB, dtype=torch.bool)
    left_out[KEPT] = False
    for whole, small in zip(*results, strict=True):
        torch.testing.assert_close(small[..., KEPT], whole[..., KEPT], rtol=1e-5, atol=1e-6)
        assert (small[..., left_out] == -torch.inf).all()


def test_the_whole_model_stays_as_it_is() -> None:
    model = tiny_model("bamba")
    lm = patched(model)
    head = lm.model.get_output_embeddings()
    TrimmedLM(lm, KEPT)
    assert lm.model.get_output_embeddings() is head
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        assert torch.equal(lm.model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_head_that_is_trained_later_is_drafted_with_as_it_is_then(has_bias: bool) -> None:
    model: Any = tiny_model("bamba")
    if has_bias:
        model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCAB))
    lm = patched(model)
    with torch.inference_mode():
        trimmed = TrimmedLM(lm, KEPT)
    head, ids = lm.model.get_output_embeddings(), torch.tensor([[3, 1, 4, 1, 5]])
    for weights in (head.weight * -1, torch.randn_like(head.weight)):
        head.load_state_dict({"weight": weights, **({"bias": torch.randn(VOCAB)} if has_bias else {})})
        whole, small = (model.prefill(model.new_state(1, 16, 4), ids) for model in (lm, trimmed))
        torch.testing.assert_close(small[:, KEPT], whole[:, KEPT], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_only_kept_tokens_are_drafted() -> None:
    lm = patched(tiny_model("mamba2"))
    run = ModelDrafter(lm, vocab=KEPT).start(VOCAB, [[1, 2, 3]], _rng())
    draft = run.propose(torch.tensor([7]), DySpec(depth=3).bind(Sampling(1.0)), 16)
    drafted = draft.tree.tokens[0][~draft.tree.is_padding[0]].tolist()[1:]
    assert drafted and set(drafted) <= set(KEPT)
    assert draft.probs is not None
    assert float(draft.probs.probs.sum(-1).sub(1).abs().max()) < 1e-5


def _rng() -> stree.Random:
    return stree.Random(0, torch.zeros(1, dtype=torch.long), torch.tensor([3]))


def test_bad_vocabularies_are_refused() -> None:
    lm = patched(tiny_model("mamba2", eos_token_id=0))
    for kept, message in (
        ([], r"a trimmed vocabulary must be a list of tokens, got shape \[0\]"),
        ([0, VOCAB], f"a trimmed vocabulary must hold tokens below {VOCAB}, got {VOCAB}"),
        ([0, -2], f"a trimmed vocabulary must hold tokens below {VOCAB}, got -2"),
        ([0, 4, 4], "a trimmed vocabulary must not repeat tokens, got 1"),
        ([4, 5], r"a trimmed vocabulary must keep the model's stop tokens, got one without \[0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelDrafter(lm, vocab=kept)
    lm.model.generation_config.eos_token_id = [0, 7]  # chat models have more than one, and the config has the first
    with pytest.raises(ValueError, match=r"must keep the model's stop tokens, got one without \[7\]"):
        ModelDrafter(lm, vocab=[0, 4, 5])
    lm.model.generation_config.eos_token_id = None  # and others have none but the config's
    with pytest.raises(ValueError, match=r"must keep the model's stop tokens, got one without \[0\]"):
        ModelDrafter(lm, vocab=[4, 5])


def test_a_head_that_is_not_linear_is_refused() -> None:
    lm = patched(tiny_model("mamba2"))
    lm.model.lm_head = torch.nn.utils.parametrizations.weight_norm(lm.model.lm_head)
    with pytest.raises(NotImplementedError, match="only a linear head at the top of the model can be trimmed"):
        TrimmedLM(lm, KEPT)


def test_a_head_that_is_not_at_the_top_is_refused() -> None:
    lm = patched(tiny_model("mamba2"))
    inner = torch.nn.Linear(lm.model.config.hidden_size, VOCAB, bias=False)
    lm.model.backbone.add_module("head", inner)
    lm.model.get_output_embeddings = lambda: inner
    with pytest.raises(NotImplementedError, match="at the top of the model can be trimmed, got Linear in Mamba2"):
        TrimmedLM(lm, KEPT)


def test_the_most_frequent_tokens_are_kept_and_the_forced_ones() -> None:
    texts = [[5, 5, 5, 2], [2, 7]]
    assert most_frequent(texts, 10, 2) == [2, 5]
    assert most_frequent(texts, 10, 3, always=[9]) == [2, 5, 9]
    assert most_frequent(texts, 10, 4) == [0, 2, 5, 7]
    assert most_frequent([], 10, 2) == [0, 1]
    assert most_frequent([[900, 900, 700, 3]], 1000, 99) == [*range(97), 700, 900], "of equally frequent ones the lower"
    with pytest.raises(ValueError, match=r"keep must be in \[2, 10\], got 1"):
        most_frequent(texts, 10, 1, always=[1, 2])
    with pytest.raises(ValueError, match=r"keep must be in \[1, 10\], got 11"):
        most_frequent(texts, 10, 11)
    with pytest.raises(ValueError, match="token 7 is outside the vocabulary of 7"):
        most_frequent(texts, 7, 2)
    with pytest.raises(ValueError, match="token -1 is outside the vocabulary of 7"):
        most_frequent([[3, -1]], 7, 2)


def test_a_saved_vocabulary_is_read_back(tmp_path: Path) -> None:
    save_vocabulary(tmp_path / "kept.json", KEPT, VOCAB)
    assert load_vocabulary(tmp_path / "kept.json", VOCAB) == KEPT
    with pytest.raises(ValueError, match=f"is of {VOCAB} tokens, the drafter has 50"):
        load_vocabulary(tmp_path / "kept.json", 50)
    with pytest.raises(ValueError, match=f"is of {VOCAB} tokens, the drafter has {VOCAB + 1}"):
        load_vocabulary(tmp_path / "kept.json", VOCAB + 1)
    (tmp_path / "other.json").write_text('{"vocab": [1]}', encoding="utf-8")
    (tmp_path / "endless.json").write_text('{"vocab_size": 7, "kept": [1e999]}', encoding="utf-8")
    for name in ("other.json", "missing.json", "endless.json"):
        with pytest.raises(ValueError, match=f"no trimmed vocabulary can be read at .*{name}"):
            load_vocabulary(tmp_path / name, VOCAB)
