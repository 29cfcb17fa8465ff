"""Making a drafter: what the folder holds, that it drafts losslessly, that a run goes on exactly, and what is refused.

Run: python -m pytest tests/test_distill.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, tiny_model
from tiny_pairs import save_tiny
from transformers import AutoTokenizer, Mamba2ForCausalLM, PreTrainedModel

import stree
from stree.cli import main
from stree.distill import Settings, distill_drafter, network, run, training
from stree.distill.continuations import draw_prompts, write_continuations
from stree.distill.folder import RunFolder
from stree.distill.report import agreement
from stree.distill.text import Batches, Text, encode, hold_out, pack
from stree.inputs import ASSETS

SETTINGS = Settings(
    hidden=16, layers=1, steps=6, batch_size=2, length=16, generated=0.25, adam_lr=2e-2, save_every=0.0
)  # fmt: skip
END = 0


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_folder: str) -> stree.TreeLM:
    return stree.TreeLM.from_pretrained(target_folder, "cpu")


@pytest.fixture(scope="module")
def tokenizer(target_folder: str) -> Any:
    return AutoTokenizer.from_pretrained(target_folder)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Texts that go round in a few words, which a drafter can learn at once."""
    rng = random.Random(0)
    starts = [rng.randrange(8) for _ in range(20)]
    return [" ".join(f"w{1 + (start + step) % 8}" for step in range(30)) for start in starts]


@pytest.fixture(scope="module")
def made(
    target: stree.TreeLM, tokenizer: Any, texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("drafter") / "made"
    return out, distill_drafter(target, tokenizer, texts, out, SETTINGS, name="tiny")


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


def test_the_drafter_leaves_greedy_text_as_it_is(
    made: tuple[Path, dict[str, Any]], target_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for drafter in (str(made[0]), "none"):
        command = ["generate", "w1 w2 w3", "--target", target_folder, "--drafter", drafter, "--max-new-tokens", "12"]
        assert main([*command, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1])["token_ids"])
    assert found[0] == found[1]


@pytest.mark.parametrize("stage", ["text", "generate", "distill"])
def test_an_interrupted_run_goes_on_to_the_same_weights(
    stage: str,
    made: tuple[Path, dict[str, Any]],
    target: stree.TreeLM,
    tokenizer: Any,
    texts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stopping(function: Callable[..., Any], after: int) -> Callable[..., Any]:
        calls = iter(range(100))

        def stopped(*arguments: Any, **options: Any) -> Any:
            if next(calls) == after:
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return stopped

    with monkeypatch.context() as patch:
        if stage == "generate":
            patch.setattr(run, "write_continuations", stopping(write_continuations, 0))
        else:
            patch.setattr(training, "_step", stopping(training._step, {"text": 1, "distill": 4}[stage]))
        with pytest.raises(KeyboardInterrupt):
            distill_drafter(target, tokenizer, texts, tmp_path / "out", SETTINGS, name="tiny")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoints"], "no part of a drafter"
    monkeypatch.setattr(run, "measure_tau", lambda *_: {"0": 1.0, "0.8": 1.0})
    again = distill_drafter(target, tokenizer, texts, tmp_path / "out", SETTINGS, name="tiny", resume=True)
    assert again["stages"]["distill"]["tokens"] == made[1]["stages"]["distill"]["tokens"]
    expected = weights(made[0])
    for name, found in weights(tmp_path / "out").items():
        assert torch.equal(found, expected[name]), name


def test_the_drafter_has_as_many_logits_as_a_padded_head(
    texts: list[str], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "measure_tau", lambda *_: {"0": 1.0, "0.8": 1.0})
    padded = stree.TreeLM(tiny_model("bamba", vocab_size=VOCAB + 31))
    settings = replace(SETTINGS, steps=1, generated=0.0, hidden=None)
    metrics = distill_drafter(padded, tokenizer, texts, tmp_path / "out", settings)
    drafter = stree.TreeLM.from_pretrained(tmp_path / "out", "cpu")
    assert drafter.vocab_size == padded.vocab_size == metrics["vocab_size"] == VOCAB + 31
    assert drafter.model.config.hidden_size == 64 and drafter.model.config.tie_word_embeddings
    prompt = [1, 2, 3]
    drafted = stree.generate(padded, [prompt], stree.drafters.ModelDrafter(drafter), max_new_tokens=8)
    assert drafted.sequences == stree.generate(padded, [prompt], budget=1, max_new_tokens=8).sequences


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


def test_a_wrong_scan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scan = network.ssd
    monkeypatch.setattr(network, "ssd", lambda *arguments: 1.01 * scan(*arguments))
    with pytest.raises(RuntimeError, match="disagrees with transformers"):
        network.check_forward(tiny_drafter(), network.use_training_forward)


def test_the_bundled_drafter_is_one_of_the_recipe() -> None:
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    config = network.drafter_config(4096, 112, 2, special).to_dict()
    bundled = json.loads((ASSETS / "drafter" / "config.json").read_text(encoding="utf-8"))
    sizes = ("hidden_size", "num_heads", "head_dim", "state_size", "num_hidden_layers", "expand", "tie_word_embeddings")
    assert {name: config[name] for name in sizes} == {name: bundled[name] for name in sizes}


@pytest.mark.parametrize("width", [16, 112, 240, 256, 272, 1024])
def test_every_width_divides_into_heads(width: int) -> None:
    config = network.drafter_config(VOCAB, width, 1, {})
    assert config.num_heads * config.head_dim == config.expand * config.hidden_size


def test_rates_rise_stay_and_fall_to_zero() -> None:
    factors = [training.schedule(part, 0.01, 0.6) for part in (0.0, 0.005, 0.01, 0.39, 0.7, 1.0, 1.2)]
    assert factors == pytest.approx([0.0909, 0.5454, 1.0, 1.0, 0.5, 0.0, 0.0], abs=1e-3)


def quick_fit(target: stree.TreeLM, folder: Path, **changes: Any) -> tuple[PreTrainedModel, float, float]:
    """Train a tiny drafter; give its divergence on the training text before and after."""
    settings = replace(SETTINGS, steps=30, generated=0.0, save_every=100.0, **changes)
    stream = np.tile(np.arange(1, 9, dtype=np.int32), 40)
    torch.manual_seed(0)
    drafter = network.build(network.drafter_config(VOCAB, 16, 1, {"eos_token_id": END}))
    laws = training.laws_of(target.model, torch.float32)
    windows = torch.from_numpy(stream[:34].astype(np.int64)).view(2, 17)
    loss = training.distill_loss(laws, settings)
    before = loss(drafter, windows).item()
    run.fit(target, laws, drafter, Text({"text": stream}, {"text": 1.0}), settings, folder)
    return drafter, before, loss(drafter, windows).item()


def test_training_lowers_the_divergence_from_the_target(target: stree.TreeLM, tmp_path: Path) -> None:
    _, before, after = quick_fit(target, tmp_path)
    assert after < 0.8 * before, f"{after} of {before}"


def test_parts_of_a_large_vocabulary_give_the_same_loss_and_gradient(
    target: stree.TreeLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    laws = training.laws_of(target.model, torch.float32)
    windows = torch.randint(1, VOCAB, (2, 17), generator=torch.Generator().manual_seed(0))
    for loss in (training.text_loss(SETTINGS), training.distill_loss(laws, SETTINGS)):
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
    batches = Batches(Text({"text": np.arange(40, dtype=np.int32)}, {"text": 1.0}), 16, 0)

    def broken(model: PreTrainedModel, windows: torch.Tensor) -> torch.Tensor:
        return torch.full((), torch.nan, requires_grad=True)

    with pytest.raises(RuntimeError, match="text: the loss is nan at step 0"):
        training.train("text", drafter, broken, batches, SETTINGS, tmp_path, steps=1)
    assert not list(tmp_path.iterdir())


def test_agreement_counts_what_it_says() -> None:
    wanted, proposed = (
        torch.tensor([[0.5, 0.5, 0.0], [0.1, 0.2, 0.7]]),
        torch.tensor([[0.25, 0.75, 0.0], [0.1, 0.2, 0.7]]),
    )
    found = agreement(wanted.clamp(min=1e-30).log(), proposed.clamp(min=1e-30).log())
    assert found["accepted"] == pytest.approx(0.75 + 1.0)
    assert found["divergence"] == pytest.approx(0.5 * np.log(2.0) + 0.5 * np.log(2 / 3))
    assert found["top1"] == 1.0  # of equal logits the first counts


def test_windows_go_on_from_a_saved_state() -> None:
    streams = {"a": np.arange(200, dtype=np.int32), "b": np.arange(500, 600, dtype=np.int32)}
    text = Text(streams, {"a": 0.5, "b": 0.5}, {"b": 2.0})
    first, second = Batches(text, 8, 3), Batches(text, 8, 3)
    drawn = [first.next(2) for _ in range(60)]
    state = json.loads(json.dumps(Batches(text, 8, 3).state))
    for step in range(60):
        fresh = Batches(text, 8, 3)
        fresh.load(state)
        found = fresh.next(2)
        assert torch.equal(found, drawn[step])
        state = fresh.state
    assert torch.equal(second.next(2), drawn[0])
    starts = [row[0].item() for batch in drawn for row in batch if row[0] >= 500]
    assert len(starts) <= 2 * 100 / 8 + 1, "a stream is left out after its passes"


def test_a_pass_covers_a_stream_before_it_repeats() -> None:
    batches = Batches(Text({"text": np.arange(1025, dtype=np.int32)}, {"text": 1.0}), 16, 0)
    windows = batches.next(63)
    assert windows.shape == (63, 17) and windows.dtype == torch.int64
    assert len(set(windows[:, 0].tolist())) == 63
    assert torch.equal(windows[:, 1:], windows[:, :-1] + 1)


def test_documents_are_packed_with_one_separator_each(tokenizer: Any) -> None:
    assert pack([[5, 6], [], [7]], END).tolist() == [5, 6, END, END, 7, END]
    assert encode(["w5 w6", "", "w7 <|end|>"], tokenizer, VOCAB, END).tolist() == [5, 6, END, 7, END]
    with pytest.raises(ValueError, match="there is no text to train on"):
        encode(["", " "], tokenizer, VOCAB, END)
    with pytest.raises(ValueError, match="the tokenizer gives token 96, but the target has 90 logits"):
        encode(["w1 w96"], tokenizer, 90, END)


@pytest.mark.parametrize(("total", "held"), [(34, 17), (400, 20), (100_000, 544)])
def test_the_end_of_a_text_is_held_out(total: int, held: int) -> None:
    rest, end = hold_out(np.arange(total), 16)
    assert np.concatenate([rest, end]).tolist() == list(range(total)) and len(end) == held
    with pytest.raises(ValueError, match=r"the text has 33 tokens; training on windows of 16 needs at least 34"):
        hold_out(np.arange(33), 16)


def test_prompts_are_whole_short_documents_or_parts_of_long_ones() -> None:
    long = list(range(100, 200))
    stream = pack([[5, 6, 7], long], END)
    prompts = draw_prompts(Text({"a": stream}, {"a": 1.0}, separator=END), 200, 8, np.random.default_rng(0))
    assert [5, 6, 7] in prompts
    for prompt in prompts:
        assert END not in prompt and prompt
        assert prompt == [5, 6, 7] or (len(prompt) == 8 and prompt == list(range(prompt[0], prompt[0] + 8)))
    assert len({prompt[0] for prompt in prompts}) > 40
    bare = draw_prompts(Text({"a": np.arange(50)}, {"a": 1.0}), 20, 8, np.random.default_rng(0))
    assert {len(prompt) for prompt in bare} == {8}


def test_what_the_target_writes_goes_on_where_it_stopped(target: stree.TreeLM, tmp_path: Path) -> None:
    text = Text({"a": np.tile(np.arange(1, 60, dtype=np.int32), 3)}, {"a": 1.0}, separator=END)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 0, "rows": 2, "new_tokens": 5}
    whole = write_continuations(target, text, tmp_path / "whole", tokens=120, **options)
    write_continuations(target, text, tmp_path / "part", tokens=50, **options)
    again = write_continuations(target, text, tmp_path / "part", tokens=120, resume=True, **options)
    assert np.array_equal(whole, again) and len(whole) >= 120
    longer = write_continuations(target, text, tmp_path / "least", tokens=1, least=200, **options)
    assert len(longer) >= 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 40}, "hidden must be a multiple of 16, got 40"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"length": 100}, r"length must be a multiple of 64, or in \[8, 64\], got 100"),
        ({"length": 4}, "got 4"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"minutes": 0.0}, "minutes must be finite and above 0, got 0.0"),
        ({"minutes": float("nan")}, "minutes must be finite and above 0, got nan"),
        ({"generated": 1.0}, r"generated must be in \[0, 1\), got 1.0"),
        ({"text_share": -0.1}, r"text_share must be in \[0, 1\), got -0.1"),
        ({"temperature": -1.0}, "temperature must be finite and not negative, got -1.0"),
        ({"adam_lr": float("inf")}, "adam_lr must be finite and above 0, got inf"),
        ({"dtype": torch.float16}, "dtype must be bfloat16 or float32"),
        ({"seed": -1}, "seed must be in"),
    ],
)
def test_settings_outside_their_range_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**changes)


def test_windows_beyond_the_target_s_positions_are_refused(tokenizer: Any, texts: list[str], tmp_path: Path) -> None:
    short = stree.TreeLM(tiny_model("llama", max_position_embeddings=12))
    with pytest.raises(ValueError, match="length must be at most the target's 12 positions, got 16"):
        distill_drafter(short, tokenizer, texts, tmp_path / "out", SETTINGS)
    assert not list(tmp_path.iterdir())


def test_folders_are_only_touched_when_told(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="made holds a finished drafter; choose another folder, or begin anew"):
        RunFolder(made[0])
    with pytest.raises(ValueError, match="holds a finished drafter: there is nothing to resume"):
        RunFolder(made[0], resume=True)
    with pytest.raises(ValueError, match="holds no run of stree distill: there is nothing to resume"):
        RunFolder(tmp_path, resume=True)
    with pytest.raises(ValueError, match="give one of them"):
        RunFolder(tmp_path, resume=True, force=True)
    (tmp_path / "mine.txt").write_text("x", encoding="utf-8")
    for force in (False, True):
        with pytest.raises(ValueError, match="holds files that stree distill did not make"):
            RunFolder(tmp_path, force=force)
    with pytest.raises(ValueError, match="mine.txt is no folder"):
        RunFolder(tmp_path / "mine.txt")
    RunFolder(tmp_path / "new").claim({"seed": 0})
    with pytest.raises(ValueError, match="holds an unfinished run; resume it, or begin anew"):
        RunFolder(tmp_path / "new")
    resumed = RunFolder(tmp_path / "new", resume=True)
    with pytest.raises(ValueError, match="holds a run with seed 0, got 1"):
        resumed.check({"seed": 1})
    (resumed.checkpoints / "text.pt").write_bytes(b"old")
    RunFolder(tmp_path / "new", force=True).claim({"seed": 1})
    assert [path.name for path in resumed.checkpoints.iterdir()] == ["run.json"], "force begins anew"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "nowhere"], "there is no file or folder nowhere"),
        (["--text", "{text}", "--length", "100"], "length must be a multiple of 64"),
        (["--text", "{text}", "--dtype", "float16"], "dtype must be bfloat16 or float32"),
        (["--text", "{text}", "--target", "no/such/folder"], "no tokenizer that transformers can read"),
        (["--text", "{text}"], "the text has 3 tokens; training on windows of 512 needs at least 1026"),
        (["--text", "{text}", "--resume"], "there is nothing to resume"),
    ],
)
def test_mistakes_on_the_command_line_are_said_and_leave_nothing(
    options: list[str], message: str, target_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("w1 w2", encoding="utf-8")
    filled = [option.format(text=tmp_path / "text.txt") for option in options]
    chosen = [] if "--target" in options else ["--target", target_folder]
    assert main(["distill", *filled, *chosen, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error, error
    assert not (tmp_path / "out").exists()


def test_ctrl_c_says_how_to_go_on(
    target_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "fit", interrupted)
    (tmp_path / "text.txt").write_text("w1 w2 w3 " * 20, encoding="utf-8")
    command = [
        "distill",
        "--target",
        target_folder,
        "--text",
        str(tmp_path / "text.txt"),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main([*command, "--length", "16", "--hidden", "16", "--layers", "1"]) == 130
    assert "--resume goes on from the last checkpoint" in capsys.readouterr().err
    assert (tmp_path / "out" / "checkpoints" / "run.json").exists()
