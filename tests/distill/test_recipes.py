"""Recipes of head training: losses and their gradients by hand, what a row must have drafted, and refined heads.

Run: python -m pytest tests/distill/test_recipes.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import stree
from stree.cli import main
from stree.distill.heads import RECIPES, griffin, new_head
from stree.distill.heads.fspad import Fspad
from stree.distill.heads.griffin import Griffin
from stree.distill.heads.hass import TOP_K, Hass
from stree.distill.heads.recipe import Recipe
from stree.distill.settings import Settings
from stree.models.heads.refinements import KEY, REFINEMENTS, Refinement
from stree.tree import TokenTree

VOCAB = 14


def probs(logits: Tensor) -> list[float]:
    powers = [math.exp(value) for value in logits.tolist()]
    return [power / sum(powers) for power in powers]


@pytest.mark.parametrize(("recipe", "top"), [(Recipe(), 0), (Hass(), TOP_K)])
def test_the_loss_of_rows_and_its_gradient_are_those_by_hand(recipe: Recipe, top: int) -> None:
    """The output head is the identity, so that the gradient of the rows is that of logits."""
    generator = torch.Generator().manual_seed(0)
    target, drafted = torch.randn(2, 3, VOCAB, generator=generator)
    drafted.requires_grad_()
    loss = recipe.loss_of_rows(drafted, torch.eye(VOCAB), target)
    (gradient,) = torch.autograd.grad(loss, drafted)
    expected = 0.0
    for row in range(3):
        p, q = probs(target[row]), probs(drafted[row])
        likeliest = sorted(range(VOCAB), key=lambda x: p[x])[VOCAB - top :]
        expected += sum(p[x] * math.log(p[x] / q[x]) for x in range(VOCAB))
        expected -= sum(p[x] * math.log(q[x]) for x in likeliest)
        mass = 1 + sum(p[x] for x in likeliest)
        by_hand = [q[x] * mass - p[x] * (2 if x in likeliest else 1) for x in range(VOCAB)]
        assert torch.allclose(gradient[row], torch.tensor(by_hand), atol=1e-5)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_the_alignment_of_fspad_is_that_by_hand_and_moves_the_feedback_alone() -> None:
    feedback = torch.tensor([[[0.5, -3.0], [0.0, 1.0]]], requires_grad=True)
    features = torch.tensor([[[0.0, 0.0], [0.0, 0.2]]], requires_grad=True)
    loss = Fspad().loss_of_feedback(feedback, features)
    assert loss.item() == pytest.approx((0.125 + 2.5 + 0.0 + 0.32) / 4)
    loss.backward()
    assert feedback.grad is not None and features.grad is None
    assert torch.allclose(feedback.grad, torch.tensor([[[0.125, -0.25], [0.0, 0.2]]]))
    assert Recipe().loss_of_feedback(feedback, features).item() == 0


def test_griffin_counts_rows_whose_tokens_so_far_were_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(griffin, "LOGITS_AT_ONCE", 2 * VOCAB)  # two rows at a time
    hidden = torch.arange(VOCAB, 0.0, -1.0).expand(1, 4, VOCAB).contiguous()  # tokens 0, 1, 2 are the likeliest
    tokens, weight = torch.tensor([[0, 3, 2, 13]]), torch.eye(VOCAB)
    first = Griffin().next_counted(hidden, weight, tokens, None)
    assert first.tolist() == [[True, False, True, False]]
    then = Griffin().next_counted(hidden[:, :3], weight, torch.tensor([[5, 1, 1]]), first)
    assert then.tolist() == [[False, False, True]]
    assert all(RECIPES[name].next_counted(hidden, weight, tokens, None) is None for name in ("plain", "hass", "fspad"))


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
@pytest.mark.parametrize("name", ["griffin", "fspad"])
def test_a_refined_head_scores_trees_as_texts_and_says_what_it_is(
    kind: str, name: str, target: stree.TreeLM, tmp_path: Path
) -> None:
    network = new_head(target, kind, 0, name)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_((parameter + 0.1 * torch.randn_like(parameter)).bfloat16())
    network.save(tmp_path)
    head: Any = stree.heads.load(tmp_path, target)
    tokens, features = torch.tensor([[5, 3, 8, 1]]), torch.randn(1, 4, head.num_features)
    expected = head.run(tokens, features)
    state = head.new_state(1)
    parts = [head.verify_features(state, TokenTree.chain(tokens[:, :n]), n - 2, features[:, n - 2 : n]) for n in (2, 4)]
    for place in range(2):
        found = torch.cat([part[place] for part in parts], 1)
        assert torch.allclose(found, expected[place], atol=1e-4)
    head.fusion.refinement = Refinement(None)  # as if the tensors were not read
    assert (head.run(tokens, features)[0] - expected[0]).abs().max() > 1e-2
    config = json.loads((tmp_path / "config.json").read_text())
    assert config[KEY] == name and type(network.fusion.refinement) is REFINEMENTS[name]  # type: ignore[union-attr]
    (tmp_path / "config.json").write_text(json.dumps({**config, KEY: "other"}))
    with pytest.raises(NotImplementedError, match="must be one of plain, griffin, fspad, got 'other'"):
        stree.heads.load(tmp_path, target)
    (tmp_path / "config.json").write_text(json.dumps({**config, KEY: "plain"}))
    with pytest.raises(ValueError, match="refinement"):
        stree.heads.load(tmp_path, target)


def test_refinements_are_those_of_their_formulas() -> None:
    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def silu(x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x))

    torch.manual_seed(0)
    config = SimpleNamespace(hidden_size=6, intermediate_size=10, rms_norm_eps=1e-6)
    guided, sampling = REFINEMENTS["griffin"](config), REFINEMENTS["fspad"](config)
    for parameter in (*guided.parameters(), *sampling.parameters()):
        torch.nn.init.normal_(parameter)
    x, e = torch.randn(2, 1, 3, 6)
    w = dict(guided.named_parameters())
    both = torch.cat([normed(x, w["norm_inputs.weight"]), normed(e, w["norm_embedding.weight"])], -1)
    assert torch.allclose(guided.inputs(x, e), x + silu(both @ w["up.weight"].T) @ w["down.weight"].T, atol=1e-4)
    w = dict(sampling.named_parameters())
    gate = silu(normed(e, w["norm_embedding.weight"]) @ w["gate.weight"].T)
    wide = gate * (normed(x, w["norm_features.weight"]) @ w["up.weight"].T)
    assert w["up.weight"].shape == (24, 6)
    assert torch.allclose(sampling.features(x, e), x + wide @ w["down.weight"].T, atol=1e-4)
    assert torch.allclose(sampling.feedback(x), x @ w["align.weight"].T, atol=1e-5)
    same = (guided.features(x, e), guided.feedback(x), sampling.inputs(x, e))
    assert all(torch.equal(one, x) for one in same)


def test_a_refined_head_begins_as_the_plain_one(target: stree.TreeLM) -> None:
    tokens = torch.randint(1, 30, (1, 12), generator=torch.Generator().manual_seed(0))
    plain, guided = new_head(target, "mtp", 0), new_head(target, "mtp", 0, "griffin")
    logits, features = torch.randn(1, 12, target.vocab_size), torch.randn(1, 12, plain.embed(tokens).shape[-1])
    guided.load_state_dict({**guided.state_dict(), **plain.state_dict()})
    guided.recipe = RECIPES["plain"]  # type: ignore[assignment]
    assert guided.loss(tokens, logits, features).item() == pytest.approx(plain.loss(tokens, logits, features).item())


@pytest.mark.parametrize(
    ("kind", "recipe", "message"),
    [
        ("mtp", "medusa", "recipe of kind mtp must be one of plain, hass, griffin, fspad, got 'medusa'"),
        ("dflash", "hass", "recipe of kind dflash must be one of plain, got 'hass'"),
        ("model", "griffin", "recipe of kind model must be one of plain, got 'griffin'"),
    ],
)
def test_an_unknown_recipe_is_named_before_anything_is_loaded(
    kind: str, recipe: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(kind=kind, recipe=recipe)
    arguments = ["distill", "--target", "/nowhere", "--text", "/nowhere", "--out", "/nowhere/out"]
    assert main([*arguments, "--kind", kind, "--recipe", recipe]) == 2
    assert message in capsys.readouterr().err
