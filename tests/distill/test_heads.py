"""Training an MTP head: its loss by hand, a run's folder, that it drafts losslessly, and speculators' own class.

Run: STREE_SPECULATORS=FOLDER python -m pytest tests/distill/test_heads.py, FOLDER with the package speculators
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_distill import SETTINGS
from safetensors.torch import load_file

import stree
from stree.distill import distill_drafter
from stree.distill.head_network import STEP_DECAY, head_loss, new_mtp, outputs_of
from stree.drafters import HeadDrafter, NoDrafter
from stree.models.heads.causal import CausalHead

HEAD = replace(SETTINGS, kind="mtp", steps=12, generated=0.0)
TEXTS = [" ".join(f"w{1 + (start + step) % 8}" for step in range(30)) for start in range(20)]


@pytest.fixture(scope="module")
def made(target: stree.TreeLM, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("head") / "made"
    return out, distill_drafter(target, tokenizer, TEXTS, out, HEAD, name="tiny")


def test_the_loss_is_the_divergence_of_each_step_from_the_target(target: stree.TreeLM) -> None:
    network, windows = new_mtp(target, 0), torch.tensor([[5, 9, 3, 7, 2, 8, 1]])
    tokens = windows[0, :-1]
    logits, hidden = outputs_of(target, [-1])(windows[:, :-1])
    head = target.model.get_output_embeddings()
    expected, features = 0.0, hidden
    with torch.no_grad():
        for step in range(3):
            out, features = network(tokens[None, 1 + step :], features[:, : 5 - step])
            for place in range(5 - step):
                wanted = logits[0, place + 1 + step].double().softmax(-1)
                found = head(out[0, place]).double().softmax(-1)
                expected += STEP_DECAY**step * float((wanted * (wanted / found).log()).sum()) / (5 - step)
        loss = head_loss(outputs_of(target, [-1]))(network, windows)
    assert float(loss) == pytest.approx(expected / sum(STEP_DECAY**step for step in range(3)), rel=1e-4)
    fusion: Any = network.fusion
    gradient = torch.autograd.grad(head_loss(outputs_of(target, [-1]))(network, windows), fusion.fc.weight)[0]
    row, column = divmod(int(gradient.abs().argmax()), gradient.shape[1])
    sides = []
    with torch.no_grad():
        for change in (1e-2, -2e-2):
            fusion.fc.weight[row, column] += change
            sides.append(float(head_loss(outputs_of(target, [-1]))(network, windows)))
    assert (sides[0] - sides[1]) / 2e-2 == pytest.approx(float(gradient[row, column]), rel=2e-2)


def test_training_lowers_the_loss_and_leaves_a_head_with_a_card(
    made: tuple[Path, dict[str, Any]], target: stree.TreeLM, tokenizer: Any
) -> None:
    out, metrics = made
    windows = torch.tensor([tokenizer(text)["input_ids"][: HEAD.length + 1] for text in TEXTS])
    untrained = float(head_loss(outputs_of(target, [-1]))(new_mtp(target, HEAD.seed), windows))
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors", "README.md", "distill.json"}
    assert metrics["stages"]["distill"]["loss"] < 0.97 * untrained
    assert "an MTP head in the layout of the package speculators" in (out / "README.md").read_text()
    assert f"| {metrics['tau']['0']:.2f} |" in (out / "README.md").read_text()


def test_the_head_drafts_losslessly(made: tuple[Path, dict[str, Any]], target: stree.TreeLM) -> None:
    drafter = stree.drafters.load(made[0], target)
    assert isinstance(drafter, HeadDrafter)
    for temperature in (0.0, 0.9):
        options: dict[str, Any] = {"max_new_tokens": 12, "seed": 2, "sampling": stree.Sampling(temperature)}
        plain = stree.generate(target, [[1, 2, 3]], NoDrafter(), **options)
        assert stree.generate(target, [[1, 2, 3]], drafter, verifier="match", **options).sequences == plain.sequences


def test_an_interrupted_run_goes_on_to_the_same_weights(
    made: tuple[Path, dict[str, Any]], target: stree.TreeLM, tokenizer: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from stree.distill.text import Batches

    real, left = Batches.next, iter(range(5))

    def interrupted(self: Batches, count: int) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return real(self, count)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Batches, "next", interrupted)
        distill_drafter(target, tokenizer, TEXTS, tmp_path / "out", HEAD, name="tiny")
    distill_drafter(target, tokenizer, TEXTS, tmp_path / "out", HEAD, name="tiny", resume=True)
    mine, whole = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", made[0]))
    assert all(torch.equal(mine[name], whole[name]) for name in whole)


@pytest.mark.skipif("STREE_SPECULATORS" not in os.environ, reason="STREE_SPECULATORS names no folder of speculators")
def test_speculators_own_class_gives_the_same_logits(made: tuple[Path, dict[str, Any]], target: stree.TreeLM) -> None:
    sys.path.append(os.environ["STREE_SPECULATORS"])
    mtp: Any = importlib.import_module("speculators.models.mtp.core")
    mtp_config: Any = importlib.import_module("speculators.models.mtp.config")
    published = json.loads((made[0] / "config.json").read_text())
    names = ("speculators_config", "transformer_layer_config")
    config = mtp_config.MTPSpeculatorConfig(**{name: published[name] for name in names})
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = mtp.MTPDraftModel(config).eval()
    shared = {
        "embed_tokens.weight": target.model.get_input_embeddings().weight,
        "lm_head.weight": target.model.get_output_embeddings().weight,
    }
    theirs.load_state_dict({**load_file(made[0] / "model.safetensors"), **shared}, strict=False)
    head = stree.heads.load(made[0], target)
    assert isinstance(head, CausalHead)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 90, (1, 68), generator=generator)
    hidden = torch.randn(1, 68, head.num_features, generator=generator)
    with torch.no_grad():
        expected = theirs.float()(ids, hidden)[0][0][0]
    count = len(expected)
    found = head.run(ids[:, 1 : 1 + count], hidden[:, :count])[0][0]
    assert count >= 64 and (found - expected).abs().max() < 1e-4 * expected.abs().max()
    wrong = head.run(ids[:, 1 : 1 + count], hidden[:, 1 : 1 + count])[0][0]
    assert (wrong - expected).abs().max() > 1e-2 * expected.abs().max()
