"""The recipe of the bundled pair: training forward of the target, its text and held-out windows."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("zstandard")
from transformers import BambaConfig

import stree
from benchmarks.training import bundled as train_bundled
from benchmarks.training import data, report
from benchmarks.training import model as train_model
from benchmarks.training.data import Document
from stree.distill import run
from stree.distill.continuations import Writing
from stree.distill.network import check_forward, hidden_states

TARGET = train_model.target_config


def tiny_target(vocab_size: int = 320, eos: int = 0, *_: int) -> BambaConfig:
    config = TARGET(vocab_size, eos)
    config.update({"hidden_size": 64, "num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 2})
    return config


def test_the_training_forward_and_its_gradients_are_those_of_transformers() -> None:
    assert check_forward(train_model.build(tiny_target()), train_model.swap) < 1e-5
    torch.manual_seed(0)
    own = train_model.build(tiny_target())
    fast = type(own)(own.config)
    fast.load_state_dict(own.state_dict())
    train_model.swap(fast, torch.float32)
    tokens = torch.randint(1, 320, (2, 128))
    own.eval()(tokens, use_cache=False).logits.log_softmax(-1)[..., 3].mean().backward()
    fast.lm_head(hidden_states(fast, tokens)).log_softmax(-1)[..., 3].mean().backward()
    for (name, wanted), found in zip(own.named_parameters(), fast.parameters(), strict=True):
        assert torch.allclose(wanted.grad, found.grad, rtol=1e-3, atol=1e-5 * float(wanted.grad.abs().max())), name


def test_a_pair_without_a_layer_of_each_kind_is_refused() -> None:
    for hidden, layers in ((200, 8), (256, 3)):
        with pytest.raises(ValueError, match=f"multiple of 128 and its layers 4 or more, got {hidden}, {layers}"):
            train_model.target_config(4096, 0, hidden, layers)


def test_the_bundled_card_is_what_its_figures_say() -> None:
    assets = Path(stree.__file__).parent / "assets"
    metrics = json.loads((assets / "metrics.json").read_text(encoding="utf-8"))
    assert report.model_card(metrics) == (assets / "README.md").read_text(encoding="utf-8")


def test_evaluation_sets_and_missing_folders_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "q", "answer": "a"}) + "\n")
    with pytest.raises(FileNotFoundError, match="no training text"):
        data.read_folders([tmp_path], seed=0)
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "q", "answer": "a"}) + "\n")
    (tmp_path / "a.py").write_text("x = 1\n")
    found = {(d.kind, d.text) for d in data.read_folders([tmp_path], seed=0)}
    assert found == {("gsm8k", "Question: q\nAnswer: a\n"), ("python", "x = 1\n")}


def test_held_out_text_reaches_neither_tokenizer_nor_streams() -> None:
    documents = [Document("python", "jinja2", "a.py", "zebra " * 50), Document("python", "rich", "b.py", "lemon " * 50)]
    tokenizer = data.train_tokenizer(documents, 300, 10_000)
    assert "lemon" in "".join(tokenizer.get_vocab()) and "zebra" not in "".join(tokenizer.get_vocab())
    stream = data.encode_streams(documents, tokenizer)["python"]
    assert tokenizer.decode(stream) == "lemon " * 50 + data.END_OF_TEXT


def test_the_pair_is_trained_and_a_second_run_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_model, "target_config", tiny_target)
    monkeypatch.setattr(run, "Writing", partial(Writing, rows=2, new_tokens=48))
    (tmp_path / "text").mkdir()
    for name in ("a.py", "b.py"):
        (tmp_path / "text" / name).write_text("x = [1, 2, 3]\n" * 200, encoding="utf-8")
    options = ["--length", "64", "--batch", "2", "--target-minutes", "0.001", "--drafter-minutes", "0.001"]
    options += ["--drafter-hidden", "16", "--vocab-size", "320", "--no-compile", "--text", str(tmp_path / "text")]
    options += ["--assets", str(tmp_path / "assets"), "--runs", str(tmp_path / "runs")]
    train_bundled.main(options)
    metrics = json.loads((tmp_path / "assets" / "metrics.json").read_text(encoding="utf-8"))
    assert list(metrics["stages"]) == ["target", "text", "distill"]
    assert all(stage["steps"] >= 1 for stage in metrics["stages"].values()) and metrics["sampled_tokens"] > 64
    kept = load_file(tmp_path / "assets" / "drafter" / "model.safetensors")
    train_bundled.main([*options, "--resume"])
    for name, found in load_file(tmp_path / "assets" / "drafter" / "model.safetensors").items():
        assert torch.equal(found, kept[name]), name
