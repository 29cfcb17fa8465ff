"""SpecBlock heads: the published layout against a plain forward, and what is refused; `test_head_drafters` has drafts.

Run: python -m pytest tests/heads/test_specblock.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.plain_heads import PlainBlocks
from helpers.tiny_heads import save_slot_head, target_and_slot_head, tiny_target

import stree


def test_run_gives_the_logits_of_a_plain_forward(tmp_path: Path) -> None:
    lm, _ = target_and_slot_head()
    weights, tokens = save_slot_head(tmp_path, lm)
    head: Any = stree.heads.load(tmp_path, lm)
    plain = PlainBlocks(weights, lm.model.get_input_embeddings().weight)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 90, (1, 11), generator=generator)
    hidden = torch.randn(1, 11, 3 * head.num_features, generator=generator)
    logits, outputs = head.run(ids, hidden)
    others = [found[..., tokens] for found, _ in (head.run(ids, hidden.roll(1, -1)), head.run(ids.roll(1), hidden))]
    assert bool((logits.index_fill(-1, tokens, -torch.inf) == -torch.inf).all())
    visible = list[int]()
    for place, token in enumerate(ids[0].tolist()):
        expected, columns = plain.block(token, plain.project(hidden[0, place]), place, visible)
        visible += columns
        wanted = plain.logits(expected)
        scale = wanted.abs().max()
        assert (outputs[0, place] - expected).abs().max() < 1e-4 * expected.abs().max()
        assert (logits[0, place][:, tokens] - wanted).abs().max() < 1e-4 * scale
        assert all((found[0, place] - wanted).abs().max() > 1e-2 * scale for found in others), "a negative control"
        assert head.ranks(logits[0, place], outputs[0, place]).tolist() == [plain.rank(x) for x in expected]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": ({"vocab_size": 64}, "must have vocab_size 97, the target's, got 64"),
    "layers": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "hidden_layers must be integers from 0"),
    "slots": ({"diffspec_draft_token_num": 5}, "must have fusion.position_queries.weight .5, 32., got .3, 32."),
}


def test_a_head_of_fewer_tokens_than_its_rank_head_reads_is_refused(tmp_path: Path) -> None:
    lm = tiny_target("bamba")
    save_slot_head(tmp_path, lm, draft_vocab=19)
    with pytest.raises(ValueError, match="draft head '/.*' must draft at least 20 tokens, got 19"):
        stree.heads.load(tmp_path, lm)


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    lm, _ = target_and_slot_head()
    save_slot_head(tmp_path, lm)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **REFUSED[name][0]}))
    with pytest.raises(ValueError, match=REFUSED[name][1]):
        stree.heads.load(tmp_path, lm)


def test_a_head_without_its_vocabulary_is_refused(tmp_path: Path) -> None:
    lm, _ = target_and_slot_head()
    save_slot_head(tmp_path, lm)
    (tmp_path / "vocab_mapping.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="draft head '/.*' cannot be read: EOFError"):
        stree.heads.load(tmp_path, lm)
    (tmp_path / "vocab_mapping.pt").unlink()
    with pytest.raises(ValueError, match="has neither the tensor d2t nor vocab_mapping.pt"):
        stree.heads.load(tmp_path, lm)
