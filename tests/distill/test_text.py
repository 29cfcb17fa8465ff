"""What a drafter is trained on: windows of packed texts, held-out ends, and what the target writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_models import VOCAB
from helpers.tiny_pairs import END

import stree
from stree.distill.continuations import Writing, write_continuations
from stree.distill.text import Batches, Corpus, encode, hold_out, pack


def test_windows_go_on_from_a_saved_state() -> None:
    streams = {"a": np.arange(200, dtype=np.int32), "b": np.arange(500, 600, dtype=np.int32)}
    text = Corpus(streams, {"a": 0.5, "b": 0.5}, {"b": 2.0})
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
    batches = Batches(Corpus({"text": np.arange(1025, dtype=np.int32)}, {"text": 1.0}), 16, 0)
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


def test_what_the_target_writes_goes_on_where_it_stopped(target: stree.TreeLM, tmp_path: Path) -> None:
    text = Corpus({"a": np.tile(np.arange(1, 60, dtype=np.int32), 3)}, {"a": 1.0}, separator=END)
    writing = Writing(temperature=1.0, seed=0, rows=2, new_tokens=5)
    whole = write_continuations(target, text, tmp_path / "whole", replace(writing, tokens=120))
    write_continuations(target, text, tmp_path / "part", replace(writing, tokens=50))
    again = write_continuations(target, text, tmp_path / "part", replace(writing, tokens=120), resume=True)
    assert np.array_equal(whole, again) and len(whole) >= 120
    longer = write_continuations(target, text, tmp_path / "least", replace(writing, tokens=1, least=200))
    assert len(longer) >= 200
