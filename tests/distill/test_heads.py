"""Training heads: their losses beside drafts, a run's folder, that it drafts losslessly, and speculators' own class.

Run: STREE_SPECULATORS=FOLDER python -m pytest tests/distill/test_heads.py, FOLDER with the package speculators
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fast_cases import slow_unless
from helpers.tiny_models import tiny_model
from helpers.tiny_pairs import SETTINGS, interrupted_after
from safetensors.torch import load_file
from torch import Tensor

import stree
from stree.distill import distill_drafter
from stree.distill.heads import HEADS, griffin, new_head
from stree.distill.heads.causal import NUM_STEPS, STEP_DECAY
from stree.distill.heads.dflash import DECAY
from stree.distill.heads.network import HeadNetwork, head_loss, outputs_of
from stree.distill.settings import RECIPES
from stree.drafters import HeadDrafter, NoDrafter
from stree.models.heads.causal import CausalHead
from stree.models.heads.dflash_head import OneShotHead

HEAD = replace(SETTINGS, kind="mtp", steps=12, generated=0.0)
CASES = [*((kind, "plain") for kind in HEADS), *((k, r) for k, names in RECIPES.items() for r in names if r != "plain")]
LIKELIEST = 30  # of GRIFFIN, for random heads
PAPERS = ("hass", "griffin", "fspad")
TEXTS = [" ".join(f"w{1 + (start + step) % 8}" for step in range(30)) for start in range(20)]


FAST = ("mtp-griffin",)


def in_ci(case: str) -> bool:
    """Whether a case is one of every kind, or one of every recipe."""
    return case.endswith("-plain") or case.startswith("mtp-")


@pytest.fixture(scope="module", params=slow_unless(FAST.__contains__, map("-".join, CASES), in_ci=in_ci))
def made(
    target: stree.TreeLM, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("head") / "made"
    kind, recipe = request.param.split("-")
    settings = replace(HEAD, kind=kind, recipe=recipe)
    return out, distill_drafter(target, tokenizer, TEXTS, out, settings, name="tiny")


def rounded(kind: str, recipe: str, target: stree.TreeLM, folder: Path) -> tuple[HeadNetwork, Any]:
    """Make a head in training whose weights bfloat16 can hold, none of them zero, and load it for inference."""
    network = new_head(target, kind, 0, recipe)
    torch.manual_seed(1)
    weights = {name: value + 0.05 * torch.randn_like(value) for name, value in network.state_dict().items()}
    network.load_state_dict({name: value.bfloat16().float() for name, value in weights.items()})
    network.save(folder)
    return network, stree.heads.load(folder, target)


def divergence(wanted: Tensor, drafted: Tensor) -> float:
    wanted = wanted.double().log_softmax(-1)
    return float((wanted.exp() * (wanted - drafted.double().log_softmax(-1))).sum())


def losses(recipe: str, head: Any, tokens: Tensor, logits: Tensor, hidden: Tensor) -> list[tuple[float, float]]:
    """Run a head's drafts behind a text, one by one: weight and loss of every drafted token that counts."""
    out, n = [], len(tokens)
    if isinstance(head, OneShotHead):
        for anchor in range(1 + int(tokens.sum()) % min(8, n - 7), n - 6, 8):
            found = head.draft(tokens[None, :anchor], hidden[:, :anchor], tokens[None, anchor])
            assert isinstance(found, Tensor)
            out += [(math.exp((1 - k) / DECAY), divergence(logits[anchor + k - 1], found[0, k])) for k in range(1, 8)]
        return out
    features = head.project(hidden[:, :, None])
    for root in range(n - 1):
        fed = features[:, : root + 1]
        for step in range(min(NUM_STEPS, n - 1 - root)):
            found, feedback = (part[0, -1] for part in head.run(tokens[None, 1 : root + 2 + step], fed))
            wanted, place = logits[root + 1 + step], root + 1 + step
            loss = divergence(wanted, found)
            if recipe == "hass":
                top = sorted(zip(wanted.double().softmax(-1), found.double().log_softmax(-1), strict=True))[-10:]
                loss -= sum(float(p * log_q) for p, log_q in top)
            if recipe == "fspad":
                gaps = (feedback - features[0, place]).abs().double()
                loss += float(torch.where(gaps < 1, gaps**2 / 2, gaps - 0.5).mean())
            out.append((STEP_DECAY**step, loss))
            if recipe == "griffin" and place + 1 < n and (found > found[tokens[place + 1]]).sum() >= LIKELIEST:
                break
            fed = torch.cat([fed, feedback[None, None]], 1)
    return out


@pytest.mark.parametrize(("kind", "recipe"), [case for case in CASES if case[0] not in ("specblock", "diffusion")])
def test_the_loss_is_that_of_drafts_beside_the_target(
    kind: str, recipe: str, target: stree.TreeLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(griffin, "TOP_K", LIKELIEST)
    network, head = rounded(kind, recipe, target, tmp_path)
    windows = torch.randint(1, 30, (1, 13), generator=torch.Generator().manual_seed(0))
    outputs = outputs_of(target, network.hidden_layers)
    logits, hidden = outputs(windows[:, :-1])
    sums: dict[float, list[float]] = {}
    for weight, one in losses(recipe, head, windows[0, :-1], logits[0], hidden):
        sums.setdefault(weight, []).append(one)
    steps = sum(sums) if kind == "dflash" else sum(STEP_DECAY**step for step in range(NUM_STEPS))
    expected = sum(weight * sum(row) / len(row) for weight, row in sums.items()) / steps
    if recipe == "griffin":
        assert len(sums[1.0]) == 11 and 0 < len(sums[STEP_DECAY]) < 10, "some rows must count, and some not"
    loss = head_loss(outputs)
    assert float(loss(network, windows).detach()) == pytest.approx(expected, rel=2e-5)
    named = max(network.named_parameters(), key=lambda one: ("refinement.down" in one[0], one[1].shape[-1]))
    parameter = named[1]
    gradient = torch.autograd.grad(loss(network, windows), parameter)[0]
    row, column = divmod(int(gradient.abs().argmax()), gradient.shape[1])
    sides = []
    with torch.no_grad():
        for change in (1e-2, -2e-2):
            parameter[row, column] += change
            sides.append(float(loss(network, windows)))
    assert (sides[0] - sides[1]) / 2e-2 == pytest.approx(float(gradient[row, column]), rel=2e-2)


def test_training_lowers_the_loss_and_leaves_a_head_with_a_card(
    made: tuple[Path, dict[str, Any]], target: stree.TreeLM, tokenizer: Any
) -> None:
    out, metrics = made
    windows = torch.tensor([tokenizer(text)["input_ids"][: HEAD.length + 1] for text in TEXTS])
    settings = metrics["settings"]
    network = new_head(target, settings["kind"], HEAD.seed, settings["recipe"])
    with torch.no_grad():
        untrained = float(head_loss(outputs_of(target, network.hidden_layers))(network, windows))
    kind = settings["kind"]
    files = {"config.json", "model.safetensors", "README.md", "distill.json"} | (
        {"vocab_mapping.pt"} if kind == "specblock" else set()
    )
    assert {path.name for path in out.iterdir()} == files
    assert metrics["stages"]["distill"]["loss"] < 0.99 * untrained  # in a few steps
    assert all(parameter.grad is None for parameter in target.model.parameters())
    card = (out / "README.md").read_text()
    layouts = {"specblock": "layout of SpecBlock's own code", "diffusion": "a masked-diffusion model"}
    assert layouts.get(kind, "layout of the package speculators") in card
    assert f"| {metrics['tau']['0']:.2f} |" in card
    assert ("other programs do not know" in card) == (settings["recipe"] in ("griffin", "fspad"))
    assert [name for name in PAPERS if f"{name.upper()}: " in card] == [
        name for name in PAPERS if name == settings["recipe"]
    ]


def test_the_head_drafts_losslessly(made: tuple[Path, dict[str, Any]], target: stree.TreeLM) -> None:
    drafter = stree.drafters.load(made[0], target)
    assert isinstance(drafter, HeadDrafter)
    assert all(parameter.requires_grad for parameter in target.model.parameters()), "the target can be trained"
    for temperature in (0.0, 0.9):
        options: dict[str, Any] = {"max_new_tokens": 12, "seed": 2, "sampling": stree.Sampling(temperature)}
        plain = stree.generate(target, [[1, 2, 3]], NoDrafter(), **options)
        assert stree.generate(target, [[1, 2, 3]], drafter, verifier="match", **options).sequences == plain.sequences


@pytest.mark.slow
@pytest.mark.parametrize("made", ["mtp-griffin"], indirect=True)
def test_an_interrupted_run_goes_on_to_the_same_weights(
    made: tuple[Path, dict[str, Any]], target: stree.TreeLM, tokenizer: Any, tmp_path: Path
) -> None:
    settings = replace(HEAD, recipe="griffin")
    with interrupted_after(5), pytest.raises(KeyboardInterrupt):
        distill_drafter(target, tokenizer, TEXTS, tmp_path / "out", settings, name="tiny")
    distill_drafter(target, tokenizer, TEXTS, tmp_path / "out", settings, name="tiny", resume=True)
    mine, whole = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", made[0]))
    assert all(torch.equal(mine[name], whole[name]) for name in whole)


@pytest.mark.parametrize("made", ["mtp-plain"], indirect=True)
@pytest.mark.skipif("STREE_SPECULATORS" not in os.environ, reason="STREE_SPECULATORS names no folder of speculators")
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # by speculators' own code
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


def test_a_target_of_an_odd_number_of_heads_gets_a_head() -> None:
    model = tiny_model("mamba2", hidden_size=320, num_heads=10, head_dim=64)
    target = stree.TreeLM(model)
    network = new_head(target, "mtp", 0)
    tokens = torch.randint(1, target.vocab_size, (1, 9))
    assert network.config()["transformer_layer_config"]["num_attention_heads"] == 5
    assert math.isfinite(float(head_loss(outputs_of(target, network.hidden_layers))(network, tokens).detach()))
