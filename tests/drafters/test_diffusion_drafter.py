"""Masked-diffusion drafters: lossless by enumeration, logits of transformers' layers, texts that are the target's.

Run: python -m pytest tests/drafters/test_diffusion_drafter.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_models import tiny_model
from torch import Tensor
from transformers import Qwen3Config, Qwen3Model

import stree
from stree.distill.heads import new_head
from stree.drafters import Draft, HeadDrafter
from stree.drafters.diffusion_state import DiffusionState
from stree.drafters.model import ModelRun
from stree.growth import Chain, Growth, Static
from stree.models.heads.diffusion import DiffusionConfig, DiffusionNetwork, MaskedDiffusion
from stree.sampling import Random
from stree.testing import CheckFailed, check_drafter
from stree.testing.enumeration import EXACT, PLAIN, drafts_of, step_bias
from stree.testing.tables import TableModel
from stree.verify import DELTA, DraftProbs

TOY = DiffusionConfig(vocab_size=3, hidden_size=32, num_layers=1, window=2, context=3)


def network_of(config: DiffusionConfig) -> DiffusionNetwork:
    torch.manual_seed(0)
    network = DiffusionNetwork(config).double()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return network.requires_grad_(False)


def toy(window: int, steps: int) -> MaskedDiffusion:
    return MaskedDiffusion(network_of(replace(TOY, window=window)), steps)


class FinalSoftmax(MaskedDiffusion):
    """Keeps the logits of the last step."""

    def step_logits(self, *args: Any) -> Tensor:
        self.final = super().step_logits(*args)
        return self.final


class WrongRun(ModelRun):
    """Says of every node of a chain that it was drawn from the softmax of the last step's logits."""

    def grow(self, growth: Growth | None, budget: int, num_calls: int = 0) -> Draft:
        draft, state = super().grow(growth, budget, num_calls), self.state
        assert draft.probs is not None and isinstance(state, DiffusionState)
        final: Any = state.model
        probs = final.final.softmax(-1)[:, : draft.probs.probs.shape[1]]
        return replace(draft, probs=DraftProbs(probs, draft.probs.row, draft.probs.kind))


class WrongDrafter(HeadDrafter):
    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> ModelRun:
        assert isinstance(self.head, MaskedDiffusion)
        return WrongRun(DiffusionState(self.head, prompts), rng)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "steps"), [(2, 1), (2, 2)])
def test_trees_are_lossless_in_every_number_of_steps(window: int, steps: int) -> None:
    drafter = HeadDrafter(toy(window, steps))
    assert check_drafter(drafter, vocab_size=3, budget=3, seeds=(0,)).worst < EXACT


@pytest.mark.parametrize(
    ("steps", "growth", "budget"),
    [
        (2, Chain(3), 4),
        (2, Static([2]), 3),
        pytest.param(3, Chain(3), 4, marks=pytest.mark.slow),
        pytest.param(3, Static([2, 1]), 5, marks=pytest.mark.slow),
    ],  # fmt: skip
)
def test_a_step_emits_the_distribution_of_the_target(steps: int, growth: Growth, budget: int) -> None:
    trees = drafts_of(HeadDrafter(toy(3, steps)), growth, budget, PLAIN, 3)
    for seed in range(2):
        target = TableModel.random(3, seed)
        assert step_bias(target, trees, "traversal") < EXACT
        assert step_bias(target, trees, "rejection") < EXACT


def test_the_softmax_of_carried_over_tokens_is_found() -> None:
    wrong = WrongDrafter(FinalSoftmax(network_of(TOY), steps=2))
    with pytest.raises(CheckFailed, match="not lossless"):
        check_drafter(wrong, vocab_size=3, growth=Chain(2), budget=3, seeds=(0,))
    trees = drafts_of(wrong, Chain(2), 3, PLAIN, 3)
    assert step_bias(TableModel.random(3, 0), trees, "traversal") > 1e-3
    assert bool((trees.probs.kind != DELTA)[:, 1:].all())


def test_logits_are_those_of_transformers_layers_over_text_and_window() -> None:
    config = replace(TOY, vocab_size=11, hidden_size=64, num_layers=2, window=4, context=6)
    network = network_of(config)
    layers = Qwen3Config(**json.loads(network.rotary_emb.config.to_json_string()), attn_implementation="eager")
    model = Qwen3Model(layers).double().eval()
    names = {name: value for name, value in network.state_dict().items() if not name.startswith("embed")}
    missing, unexpected = model.load_state_dict(names, strict=False)
    assert missing == ["embed_tokens.weight"] and not unexpected
    text = [3, 1, 4, 1]
    seen, drawn = list[Tensor](), torch.tensor([[5, 9, 2, 6]])

    def sampler(step: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(logits)
        return drawn, torch.tensor([[0.1, 0.2, 0.9, 0.3]])

    tokens, is_text = torch.tensor([[0, 0, *text]]), torch.tensor([[False, False, True, True, True, True]])
    found = MaskedDiffusion(network, steps=2).denoise(tokens, is_text, sampler)
    for logits, window in ((seen[0], [11, 11, 11, 11]), (found, [11, 11, 2, 6])):
        ids = torch.tensor([*text, *window])
        mask = torch.ones(8, 8).tril().bool()
        mask[4:] = True
        scores = torch.where(mask, 0.0, -torch.inf).double()[None, None]
        hidden = model(inputs_embeds=network.embed_tokens(ids)[None], attention_mask=scores).last_hidden_state[0, 4:]
        expected = hidden @ network.embed_tokens.weight[:-1].T
        masked = [place for place, token in enumerate(window) if token == 11]
        assert torch.allclose(logits[0, masked], expected[masked], atol=1e-5)  # rotary angles are float32
    assert torch.equal(found[0, 2:], seen[0][0, 2:]), "tokens in place were drawn from the first step's distributions"


def test_what_cannot_be_drafted_is_refused(tmp_path: Path) -> None:
    lm = stree.TreeLM(tiny_model("mamba2").float())
    new_head(lm, "diffusion", 0).save(tmp_path)
    file = tmp_path / "config.json"
    published = json.loads(file.read_text())
    for change, message in (
        ({"vocab_size": 7}, f"was made for 7 tokens, the target has {lm.vocab_size}"),
        ({"steps": 9}, "steps must be at most the window's 8 tokens, got 9"),
        ({"hidden_size": 40}, "hidden_size must be a multiple of 32, got 40"),
        ({"num_layers": 1}, "tensors differ"),
    ):
        file.write_text(json.dumps({**published, **change}))
        with pytest.raises(ValueError, match=message):
            stree.drafters.load(tmp_path, lm)
    file.write_text(json.dumps(published))
    with pytest.raises(NotImplementedError, match="cannot be trimmed"):
        HeadDrafter(stree.heads.load(tmp_path, lm), vocab=[1])
    with pytest.raises(ValueError, match=r"steps must be in \[1, 2\], got 3"):
        toy(2, 1).with_steps(3)
    assert asdict(TOY)["steps"] == 1
