"""The training recipe: swapped scan, schedule, packing, held-out windows, and that a few steps lower the loss.

python -m pytest tests/test_train_bundled.py
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("tqdm")
pytest.importorskip("zstandard")
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import train_bundled
import train_data
import train_model
import train_report
from train_data import Batches, Document
from transformers import AutoModelForCausalLM, BambaConfig, Mamba2Config, PreTrainedModel

EAGER = train_bundled.Settings(batch=2, length=64, dtype=torch.float32, compile=False, adam_lr=1e-2)


def tiny_target() -> BambaConfig:
    config = train_model.target_config(320, 0)
    config.update({"hidden_size": 64, "num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 2})
    return config


def tiny_drafter() -> Mamba2Config:
    config = train_model.drafter_config(320, 0)
    config.update({"hidden_size": 64, "num_heads": 4})
    return config


@pytest.mark.parametrize("config", [tiny_target(), tiny_drafter()], ids=["bamba", "mamba2"])
def test_swapped_forward_equals_transformers(config: BambaConfig | Mamba2Config) -> None:
    assert train_model.check_swap(config) < 1e-5


def test_swapped_gradients_equal_transformers() -> None:
    torch.manual_seed(0)
    own = train_model.build(tiny_target())
    fast = type(own)(own.config)
    fast.load_state_dict(own.state_dict())
    train_model.swap(fast, torch.float32)
    tokens = torch.randint(1, 320, (2, 128))
    own.eval()(tokens, use_cache=False).logits.log_softmax(-1)[..., 3].mean().backward()
    fast.lm_head(train_model.hidden_states(fast, tokens)).log_softmax(-1)[..., 3].mean().backward()
    for (name, wanted), found in zip(own.named_parameters(), fast.parameters(), strict=True):
        assert torch.allclose(wanted.grad, found.grad, rtol=1e-3, atol=1e-5 * float(wanted.grad.abs().max())), name


def test_check_refuses_a_wrong_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    scan = train_model.ssd
    monkeypatch.setattr(train_model, "ssd", lambda *arguments: 1.01 * scan(*arguments))
    with pytest.raises(RuntimeError, match="disagrees with transformers"):
        train_model.check_swap(tiny_drafter())


def test_parameter_counts() -> None:
    assert 4e6 < train_model.build(train_model.target_config(4096, 0)).num_parameters() < 8e6
    assert 5e5 < train_model.build(train_model.drafter_config(4096, 0)).num_parameters() < 7e5


def test_schedule_warms_up_stays_and_decays_to_zero() -> None:
    factors = [train_bundled.schedule(p, 0.01, 0.6) for p in (0.0, 0.005, 0.01, 0.39, 0.7, 1.0, 1.2)]
    assert factors == pytest.approx([0.0909, 0.5454, 1.0, 1.0, 0.5, 0.0, 0.0], abs=1e-3)


def test_pack_puts_end_of_text_after_every_document() -> None:
    stream = train_data.pack([[5, 6], [], [7]], eos=0)
    assert stream.dtype == np.uint16
    assert stream.tolist() == [5, 6, 0, 0, 7, 0]


def test_batches_cover_a_stream_before_repeating_and_keep_the_mixture() -> None:
    streams = {"python": np.arange(1025, dtype=np.uint16), "gsm8k": np.arange(1025, dtype=np.uint16)}
    batches = Batches(streams, length=16, seed=0)
    starts = [int(batches.window("python")[0]) for _ in range(63)]
    assert len(set(starts)) == 63
    windows = Batches(streams, length=16, seed=0).next(8)
    assert windows.shape == (8, 17) and windows.dtype == torch.int64
    assert torch.equal(windows[:, 1:], windows[:, :-1] + 1)


def test_batches_leave_out_a_stream_past_its_last_epoch() -> None:
    streams = {"python": np.ones(40_000, dtype=np.uint16), "gsm8k": np.zeros(100, dtype=np.uint16)}
    batches = Batches(streams, length=16, seed=0)
    drawn = torch.cat([batches.next(50) for _ in range(20)])
    assert (drawn[:, 0] == 0).sum() * 16 <= 3.6 * 100 + 50 * 16


def test_short_streams_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter than a window of 65 tokens"):
        Batches({"python": np.zeros(60, dtype=np.uint16)}, length=64, seed=0)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 30])
def test_measured_windows_score_every_token_once(length: int) -> None:
    tokens = list(range(1, length + 1))
    scored = [t for piece, count in train_report.windows(tokens, 0, 8) for t in piece[-count:]]
    assert scored == tokens
    assert all(len(piece) <= 8 and count < len(piece) for piece, count in train_report.windows(tokens, 0, 8))


def test_evaluation_sets_and_missing_folders_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "q", "answer": "a"}) + "\n")
    with pytest.raises(FileNotFoundError, match="no training text"):
        train_data.read_folders([tmp_path], seed=0)
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "q", "answer": "a"}) + "\n")
    (tmp_path / "a.py").write_text("x = 1\n")
    found = {(d.kind, d.text) for d in train_data.read_folders([tmp_path], seed=0)}
    assert found == {("gsm8k", "Question: q\nAnswer: a\n"), ("python", "x = 1\n")}


def test_held_out_text_reaches_neither_tokenizer_nor_streams() -> None:
    documents = [Document("python", "jinja2", "a.py", "zebra " * 50), Document("python", "rich", "b.py", "lemon " * 50)]
    tokenizer = train_data.train_tokenizer(documents, 300, 10_000)
    assert "lemon" in "".join(tokenizer.get_vocab()) and "zebra" not in "".join(tokenizer.get_vocab())
    stream = train_data.encode_streams(documents, tokenizer)["python"]
    assert tokenizer.decode(stream) == "lemon " * 50 + train_data.END_OF_TEXT


def test_three_steps_lower_the_loss_and_resume_continues(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = train_model.build(tiny_target())
    streams = {"python": np.tile(np.arange(1, 21, dtype=np.uint16), 50)}
    loss_fn = train_bundled.text_loss(EAGER)
    windows = Batches(streams, 64, 1).next(2)
    before = loss_fn(model, windows).item()
    done = train_bundled.train("t", model, loss_fn, Batches(streams, 64, 0), 60.0, EAGER, tmp_path, max_steps=3)
    after = loss_fn(model, windows).item()
    assert done["steps"] == 3 and done["tokens"] == 3 * 2 * 64
    assert after < before
    other = train_model.build(tiny_target())
    done = train_bundled.train("t", other, loss_fn, Batches(streams, 64, 0), 60.0, EAGER, tmp_path, True, max_steps=3)
    assert done["steps"] == 3
    assert loss_fn(other, windows).item() == pytest.approx(after, rel=1e-5)


def test_distillation_lowers_the_divergence_and_vanishes_on_equal_models(tmp_path: Path) -> None:
    torch.manual_seed(0)
    target, drafter = train_model.build(tiny_target()), train_model.build(tiny_drafter())
    train_model.swap(target, torch.float32)
    loss_fn = train_bundled.distill_loss(target, EAGER)
    windows = torch.randint(1, 320, (2, 65))
    assert loss_fn(target, windows).item() == pytest.approx(0.0, abs=1e-6)
    streams = {"sampled": np.random.default_rng(0).integers(1, 320, 2000).astype(np.uint16)}
    batches = Batches(streams, 64, 0)
    with torch.no_grad():
        before = float(loss_fn(drafter_swapped(drafter), windows))
    train_bundled.train("d", drafter, loss_fn, batches, 60.0, EAGER, tmp_path, max_steps=5)
    assert loss_fn(drafter, windows).item() < before


def drafter_swapped(drafter: PreTrainedModel) -> PreTrainedModel:
    train_model.swap(drafter, torch.float32)
    return drafter


def test_sampling_continues_past_end_of_text_and_saving_round_trips(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = train_model.build(tiny_target())
    streams = {"python": np.tile(np.arange(0, 20, dtype=np.uint16), 50)}
    stream = train_bundled.sample_stream(model, Batches(streams, 64, 0), 0.0, "cpu", width=8)
    assert stream.shape == (32 * (32 + 8),) and stream.dtype == np.uint16
    documents = [Document("python", "rich", "b.py", "lemon " * 50)]
    tokenizer = train_data.train_tokenizer(documents, 300, 10_000)
    train_bundled.save_model(model, tokenizer, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.config.eos_token_id == 0
    for name, wanted in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], wanted.bfloat16().float()), name
