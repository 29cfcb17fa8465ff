"""Training a drafter: its forward is that of transformers, its losses fall and are what they are called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.cuda_packages import REFUSAL, bind_packages
from helpers.tiny_models import VOCAB
from helpers.tiny_pairs import END, SETTINGS
from transformers import PreTrainedModel

import stree
from stree.distill import network, run, training
from stree.distill.report import agreement
from stree.distill.text import Batches, Corpus


def tiny_drafter(width: int = 64) -> PreTrainedModel:
    torch.manual_seed(0)
    return network.build(network.drafter_config(VOCAB, width, 2, {"eos_token_id": END}))


def test_the_training_forward_and_its_gradients_are_those_of_transformers() -> None:
    assert network.check_forward(tiny_drafter(), network.use_training_forward) < 1e-5
    own, fast = tiny_drafter().eval(), tiny_drafter()
    network.use_training_forward(fast, torch.float32)
    tokens = torch.randint(1, VOCAB, (2, 128), generator=torch.Generator().manual_seed(0))
    for model in (own, fast):
        model.lm_head(network.hidden_states(model, tokens)).log_softmax(-1)[..., 3].mean().backward()
    for (name, wanted), found in zip(own.named_parameters(), fast.parameters(), strict=True):
        assert torch.allclose(wanted.grad, found.grad, rtol=1e-3, atol=1e-5 * float(wanted.grad.abs().max())), name


def test_a_drafter_on_a_cpu_is_checked_where_packages_for_cuda_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = tiny_drafter()
    bind_packages(monkeypatch, type(drafter.base_model.layers[0].mixer))
    with pytest.raises(RuntimeError, match=REFUSAL):
        drafter(torch.arange(1, 6)[None])
    assert network.check_forward(drafter, network.use_training_forward) < 1e-5


def test_a_wrong_scan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scan = network.ssd
    monkeypatch.setattr(network, "ssd", lambda *arguments: 1.01 * scan(*arguments))
    with pytest.raises(RuntimeError, match="disagrees with transformers"):
        network.check_forward(tiny_drafter(), network.use_training_forward)


def test_training_lowers_the_divergence_from_the_target(target: stree.TreeLM, tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=30, generated=0.0, save_every=100.0)
    stream = np.tile(np.arange(1, 9, dtype=np.int32), 40)
    torch.manual_seed(0)
    drafter = network.build(network.drafter_config(VOCAB, 16, 1, {"eos_token_id": END}))
    probs = training.probs_of(target.model, torch.float32)
    windows = torch.from_numpy(stream[:34].astype(np.int64)).view(2, 17)
    loss = training.distill_loss(probs, settings)
    before = loss(drafter, windows).item()
    run.fit(target, probs, drafter, Corpus({"text": stream}, {"text": 1.0}), settings, tmp_path)
    assert loss(drafter, windows).item() < 0.8 * before


def test_parts_of_a_large_vocabulary_give_the_same_loss_and_gradient(
    target: stree.TreeLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    probs = training.probs_of(target.model, torch.float32)
    windows = torch.randint(1, VOCAB, (2, 17), generator=torch.Generator().manual_seed(0))
    for loss in (training.text_loss(SETTINGS), training.distill_loss(probs, SETTINGS)):
        found = []
        for limit in (1 << 26, 5 * VOCAB):
            monkeypatch.setattr(training, "LOGITS_AT_ONCE", limit)
            torch.manual_seed(0)
            drafter = network.build(network.drafter_config(VOCAB, 16, 1, {}))
            value = loss(drafter, windows)
            value.backward()
            found.append((value.detach(), drafter.get_input_embeddings().weight.grad))
        torch.testing.assert_close(found[0], found[1])


def test_a_loss_that_is_not_finite_ends_the_stage(target: stree.TreeLM, tmp_path: Path) -> None:
    drafter = network.build(network.drafter_config(VOCAB, 16, 1, {}))
    batches = Batches(Corpus({"text": np.arange(40, dtype=np.int32)}, {"text": 1.0}), 16, 0)

    def broken(model: PreTrainedModel, windows: torch.Tensor) -> torch.Tensor:
        return torch.full((), torch.nan, requires_grad=True)

    with pytest.raises(RuntimeError, match="text: the loss is nan at step 0"):
        training.train(tmp_path / "text.pt", drafter, broken, batches, SETTINGS, ("steps", 1))
    assert not list(tmp_path.iterdir())


def test_agreement_counts_what_it_says() -> None:
    wanted = torch.tensor([[0.5, 0.5, 0.0], [0.1, 0.2, 0.7]])
    proposed = torch.tensor([[0.25, 0.75, 0.0], [0.1, 0.2, 0.7]])
    found = agreement(wanted.clamp(min=1e-30).log(), proposed.clamp(min=1e-30).log())
    assert found["accepted"] == pytest.approx(0.75 + 1.0)
    assert found["divergence"] == pytest.approx(0.5 * np.log(2.0) + 0.5 * np.log(2 / 3))
    assert found["top1"] == 1.0  # of equal logits the first counts
