"""Making a drafter: what the folder holds, that it drafts losslessly, how a run goes on, and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_models import VOCAB, tiny_model
from helpers.tiny_pairs import SETTINGS, interrupted_after
from transformers import Mamba2ForCausalLM

import stree
from stree.distill import distill_drafter
from stree.distill.folder import RunFolder
from stree.files import alone_in


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Texts that go round in a few words, which a drafter can learn at once."""
    rng = random.Random(0)
    starts = [rng.randrange(8) for _ in range(20)]
    return [" ".join(f"w{1 + (start + step) % 8}" for step in range(30)) for start in starts]


@pytest.fixture(scope="module")
def distilled(target: stree.TreeLM, tokenizer: Any, texts: list[str]) -> Callable[..., dict[str, Any]]:
    """Give what distils a drafter for the target from the texts into a folder."""
    return partial(distill_drafter, target, tokenizer, texts, settings=SETTINGS)


@pytest.fixture(scope="module")
def made(
    distilled: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("drafter") / "made"
    return out, distilled(out, name="tiny")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(Mamba2ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict())


def test_the_folder_is_a_drafter_with_a_card_and_nothing_else(made: tuple[Path, dict[str, Any]]) -> None:
    out, metrics = made
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "distill.json"} <= names
    assert not [name for name in names if "part" in name or name == "checkpoints"]
    assert json.loads((out / "distill.json").read_text(encoding="utf-8")) == metrics
    card = (out / "README.md").read_text(encoding="utf-8")
    for figure in (metrics["held_out"]["divergence"], metrics["held_out"]["top1"]):
        assert f"| {figure:.3f} |" in card
    assert f"| {metrics['tau']['0']:.2f} |" in card
    assert metrics["stages"]["text"]["steps"] == 2 and metrics["stages"]["distill"]["steps"] == 4
    assert metrics["generated_tokens"] >= SETTINGS.length + 1
    assert 1.0 <= metrics["tau"]["0"] <= 5.0


def test_the_drafter_leaves_greedy_text_as_it_is(made: tuple[Path, dict[str, Any]], target: stree.TreeLM) -> None:
    drafter = stree.drafters.ModelDrafter(stree.TreeLM.from_pretrained(made[0], "cpu"))
    plain = stree.generate(target, [[1, 2, 3]], budget=1, max_new_tokens=12)
    assert stree.generate(target, [[1, 2, 3]], drafter, max_new_tokens=12).sequences == plain.sequences


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 4], ids=["text", "distill"])  # steps of training
def test_an_interrupted_run_goes_on_to_the_same_weights(
    after: int,
    made: tuple[Path, dict[str, Any]],
    distilled: Callable[..., dict[str, Any]],
    texts: list[str],
    tokenizer: Any,
    tmp_path: Path,
) -> None:
    with interrupted_after(after), pytest.raises(KeyboardInterrupt):
        distilled(tmp_path / "out", name="tiny")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoints"], "no part of a drafter"
    other = stree.TreeLM(tiny_model("mamba2", seed=7))
    with pytest.raises(ValueError, match="holds a run with target_weights"):
        distill_drafter(other, tokenizer, texts, tmp_path / "out", SETTINGS, name="tiny", resume=True)
    again = distilled(tmp_path / "out", name="tiny", resume=True)
    assert again["stages"]["distill"]["tokens"] == made[1]["stages"]["distill"]["tokens"]
    expected = weights(made[0])
    for name, found in weights(tmp_path / "out").items():
        assert torch.equal(found, expected[name]), name


@pytest.mark.slow
def test_the_drafter_has_as_many_logits_as_a_padded_head(texts: list[str], tokenizer: Any, tmp_path: Path) -> None:
    padded = stree.TreeLM(tiny_model("bamba", vocab_size=VOCAB + 31))
    settings = replace(SETTINGS, steps=1, generated=0.0, hidden=None)
    metrics = distill_drafter(padded, tokenizer, texts, tmp_path / "out", settings)
    drafter = stree.TreeLM.from_pretrained(tmp_path / "out", "cpu")
    assert drafter.vocab_size == padded.vocab_size == metrics["vocab_size"] == VOCAB + 31
    assert drafter.model.config.hidden_size == 64 and drafter.model.config.tie_word_embeddings
    prompt = [1, 2, 3]
    drafted = stree.generate(padded, [prompt], stree.drafters.ModelDrafter(drafter), max_new_tokens=8)
    assert drafted.sequences == stree.generate(padded, [prompt], budget=1, max_new_tokens=8).sequences


def test_folders_are_only_touched_when_asked(
    made: tuple[Path, dict[str, Any]], distilled: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="made holds a finished drafter; choose another folder, or begin anew"):
        distilled(made[0])
    with pytest.raises(ValueError, match="holds a finished drafter: there is nothing to resume"):
        distilled(made[0], resume=True)
    with pytest.raises(ValueError, match="holds no run of stree distill: there is nothing to resume"):
        distilled(tmp_path, resume=True)
    with pytest.raises(ValueError, match="give one of them"):
        distilled(tmp_path, resume=True, force=True)
    (tmp_path / "mine.txt").write_text("x", encoding="utf-8")
    for force in (False, True):
        with pytest.raises(ValueError, match="holds files that stree distill did not make"):
            distilled(tmp_path, force=force)
    with pytest.raises(ValueError, match="mine.txt is a file"):
        distilled(tmp_path / "mine.txt")


def test_an_unfinished_run_is_only_resumed_as_it_was_begun_and_replaced_by_force(tmp_path: Path) -> None:
    RunFolder(tmp_path / "new").claim({"seed": 0})
    with pytest.raises(ValueError, match="holds an unfinished run; resume it, or begin anew"):
        RunFolder(tmp_path / "new")
    resumed = RunFolder(tmp_path / "new", resume=True)
    for config, message in (({"seed": 1}, "seed 0, got 1"), ({"seed": 0, "rounds": 2}, "rounds None, got 2")):
        with pytest.raises(ValueError, match=f"holds a run with {message}"):
            resumed.claim(config)
    (resumed.checkpoints / "text.pt").write_bytes(b"old")
    RunFolder(tmp_path / "new", force=True).claim({"seed": 1})
    assert [path.name for path in resumed.checkpoints.iterdir()] == ["run.json"], "force begins anew"


@pytest.mark.parametrize("force", [False, True])
def test_two_runs_into_one_folder_at_once_are_refused(
    distilled: Callable[..., dict[str, Any]], tmp_path: Path, force: bool
) -> None:
    with alone_in(tmp_path / "out"):
        with pytest.raises(ValueError, match=r"another run writes into .*out; wait for its end"):
            distilled(tmp_path / "out", force=force)
        assert not list((tmp_path / "out").iterdir())
