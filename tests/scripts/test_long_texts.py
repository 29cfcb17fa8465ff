"""Long prompts are cut from held-out texts, and a target with more positions is the same function of a text.

Run: python -m pytest tests/scripts/test_long_texts.py
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

pytest.importorskip("zstandard")
import zstandard
from transformers import AutoModelForCausalLM

from benchmarks.studies import long_prompts
from benchmarks.studies.positions import losses, measure, with_positions
from benchmarks.training.answers import requests
from stree.bench.prompts import parse_suites, read_suite
from stree.inputs import ASSETS, load_tokenizer
from stree.models.tree_lm import TreeLM

BOOK = "Bram Stoker/The Lair of the White Worm.md"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Corpora of a held-out text and another one each, and two questions."""
    texts = {
        "english.jsonl.zst": [("books", BOOK, "worm"), ("books", "other.md", "shark")],
        "python_code.jsonl.zst": [("anyio", "a.py", "held"), ("numpy", "b.py", "other")],
    }
    for name, documents in texts.items():
        lines = [
            json.dumps({"source": source, "path": path, "text": " ".join(f"{word} {i}" for i in range(400))})
            for source, path, word in documents
        ]
        path = tmp_path / "corpus" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(zstandard.compress("\n".join(lines).encode()))
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "train.jsonl").write_text('{"question": "How many?", "answer": "1"}\n')
    return tmp_path


@pytest.mark.parametrize("asks", [False, True])
def test_suites_of_long_prompts_end_at_the_same_places(asks: bool, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--tokens", "20,50", "--count", "4", "--corpus", str(data / "corpus"), "--out", str(data / "long")]
    monkeypatch.setattr(sys, "argv", ["long_prompts", *options, *(["--request"] if asks else [])])
    long_prompts.main()
    suites = parse_suites(f"long-20={data}/long/long-20.jsonl,long-50={data}/long/long-50.jsonl")
    short, long = ([prompt.turns[0] for prompt in read_suite(name, path)] for name, path in suites.items())
    tokenizer = load_tokenizer(str(ASSETS / "target"))
    for number, (first, second) in enumerate(zip(short, long, strict=True)):
        text, _, request = first.partition("\n\n")
        assert second.endswith(first) and len(second) > len(first)
        assert ("held", "worm")[number % 2 == 0] in text and "shark" not in second and "other" not in second
        assert bool(request) == asks and request in ("", *long_prompts.REQUESTS.values())
        assert len(tokenizer(text)["input_ids"]) == pytest.approx(20, abs=2)
    assert len(set(short)) == 4


def test_a_text_too_short_for_a_passage_is_refused() -> None:
    assert long_prompts.passages(range(10), [2, 4], 2) == [[[2, 3], [8, 9]], [[0, 1, 2, 3], [6, 7, 8, 9]]]
    with pytest.raises(ValueError, match="passage of 11 tokens needs a text of that many, got 10"):
        long_prompts.passages(range(10), [11], 1)


def test_a_target_with_more_positions_has_the_loss_of_the_target(tmp_path: Path) -> None:
    with_positions(ASSETS / "target", 1 << 16, tmp_path / "copy")
    tokens = torch.arange(5, 305).tolist()
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "target", dtype=torch.float32).eval()
    ids = torch.tensor([tokens])
    with torch.no_grad():
        wanted = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
    lm = TreeLM.from_pretrained(tmp_path / "copy", "cpu")
    assert lm.max_length == 1 << 16 and TreeLM.from_pretrained(ASSETS / "target", "cpu").max_length == 4096
    assert torch.allclose(losses(lm, tokens), wanted, atol=1e-3)


def test_requests_are_questions_and_passages_that_are_not_held_out(data: Path) -> None:
    found = list(islice(requests(data), 40))
    assert found[::2] == 20 * ["How many?"]
    assert all("shark" in text or "other" in text for text in found[1::2])
    assert not any("worm" in text or "held" in text for text in found) and len(set(found[1::2])) > 5


@pytest.mark.slow
def test_the_loss_is_averaged_by_ranges_of_positions_and_from_a_short_context(data: Path) -> None:
    found = measure(ASSETS / "target", data / "corpus", 1200, 2)
    text = long_prompts.held_out_tokens(str(ASSETS / "target"), data / "corpus", "english")
    lm = TreeLM.from_pretrained(ASSETS / "target", "cpu")
    (windows,) = long_prompts.passages(text, [1200], 2)
    mean = torch.stack([losses(lm, window) for window in windows]).mean(0)
    ranges = {"0-512": mean[:512], "512-1024": mean[512:1024], "1024-1199": mean[1024:]}
    assert found["nats"] == {name: pytest.approx(float(part.mean()), abs=1e-3) for name, part in ranges.items()}
    assert "0-512" not in found["nats_short"], "its tokens have no short context"
    last = torch.stack([losses(lm, window[512:])[1023 - 511 :] for window in windows]).mean()
    assert found["nats_short"]["1024-1199"] == pytest.approx(float(last), abs=1e-3)
    assert found["nats_short"]["512-1024"] == pytest.approx(found["nats"]["512-1024"], abs=0.1)
