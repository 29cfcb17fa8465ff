"""What changes between two texts and what fails: steps are captured anew, and no text is another one.

Run: python -m pytest tests/decode/test_captured_anew.py
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.captured import TEXTS, Tape, captured, generate, launched, near_drafter
from helpers.tiny_family_models import family_model
from helpers.tiny_models import patched, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

import stree
from stree.decode import memory as room
from stree.drafters import ModelDrafter
from stree.growth import Calibrated, Chain
from stree.sampling import Sampling


def is_replayed(found: stree.Generation) -> bool:
    return bool(found.stats["graphs"]["replays"] == found.stats["steps"])


@pytest.mark.slow
def test_texts_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = generate(launched(), near_drafter(), budget=1, max_new_tokens=8).sequences
    other: list[dict[str, Any]] = [
        {"budget": 1}, {"budget": 1, "sampling": Sampling(0.8)}, {}, {"texts": TEXTS[:1]},
        {"sampling": Sampling(0.5)}, {"sampling": Sampling(0.5), "verifier": "match"}, {"growth": Chain(2)}, {},
        {"stop_token_ids": [plain[0][-3]]}, {"max_length": 400},
    ]  # fmt: skip
    kinds = [{"budget": 4, "max_new_tokens": 8, **kind} for kind in other]
    expected = [generate(launched(), near_drafter(), **kind).sequences for kind in kinds]
    lm = captured(monkeypatch)
    assert [generate(lm, near_drafter(), **kind).sequences for kind in kinds] == expected
    latest = generate(lm, near_drafter(), **kinds[-1])
    assert latest.sequences == expected[-1] and is_replayed(latest), "it is kept"


@pytest.mark.slow
def test_weights_that_move_or_change(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = captured(monkeypatch)
    expected = generate(lm, None, budget=8).sequences
    for tensors in (lm.model.parameters(), lm.model.buffers()):
        for tensor in tensors:  # what a trip to another device and back does
            tensor.data = tensor.data.clone()
        moved = generate(lm, None, budget=8)
        assert moved.sequences == expected and not is_replayed(moved)
    other = tiny_model("bamba", seed=7)
    lm.model.load_state_dict(other.state_dict(), assign=True)
    assert generate(lm, None, budget=8).sequences == generate(patched(other), None, budget=8).sequences


def test_weights_without_a_storage_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Made(torch.nn.Parameter):
        """Such as torchao's quantised weights."""

        def data_ptr(self) -> int:
            raise RuntimeError("it has no storage")

    lm = captured(monkeypatch)
    expected = generate(lm, None, budget=8).sequences
    lm.model.model.final_layernorm.weight = Made(lm.model.model.final_layernorm.weight.detach())
    made = [generate(lm, None, budget=8) for _ in range(2)]
    assert [one.sequences for one in made] == [expected] * 2
    assert [is_replayed(one) for one in made] == [False, True]


@pytest.mark.slow
def test_a_setting_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, options = captured(monkeypatch, stree.TreeLM(family_model("granitemoehybrid"))), dict[str, Any](budget=8)
    options["sampling"] = Sampling(0.8)
    before = generate(lm, None, **options).sequences
    lm.model.config.logits_scaling *= 2  # the model divides by it in every call
    found, eager = generate(lm, None, **options), stree.TreeLM(family_model("granitemoehybrid"))
    eager.model.config.logits_scaling *= 2
    assert found.sequences == generate(eager, None, **options).sequences != before


@pytest.mark.parametrize(
    "option",
    ["defers_commit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fused_layers", "fused_mixers"))],
)
def test_a_switch_of_the_target(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = captured(monkeypatch)
    expected = generate(lm, None, budget=8).sequences
    setattr(lm, option, option != "fused_layers")
    found = [generate(lm, None, budget=8) for _ in range(2)]
    assert [one.sequences for one in found] == [expected] * 2
    assert [is_replayed(one) for one in found] == [False, True]


@pytest.mark.slow
def test_adapters_and_hooks_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters are switched by attributes of their layers, as peft's are; a hook that is gone leaves no trace."""

    class Switched(torch.nn.Module):
        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base, self.active = base, ["none"]

        def forward(self, x: Tensor) -> Any:
            return self.base(x) * (3 if "louder" in self.active else 1)

    lm = captured(monkeypatch)
    layer = lm.model.model.layers[0]
    layer.feed_forward = adapter = Switched(layer.feed_forward)
    found = []
    for active, is_hooked in (("none", False), ("louder", False), ("none", True), ("none", False)):
        adapter.active[0] = active
        hook = layer.feed_forward.register_forward_hook(lambda *given: -given[-1]) if is_hooked else None
        found.append(generate(lm, None, budget=8))
        eager = stree.TreeLM(copy.deepcopy(lm.model))
        assert found[-1].sequences == generate(eager, None, budget=8).sequences
        if hook is not None:
            hook.remove()
    assert found[0].sequences not in (found[1].sequences, found[2].sequences) and is_replayed(found[3])


@pytest.mark.slow
def test_a_drafter_made_anew_of_the_same_model_finds_what_was_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, options = captured(monkeypatch), dict[str, Any](budget=8, sampling=Sampling(0.8))
    expected = generate(lm, near_drafter(), **options).sequences
    found = generate(lm, ModelDrafter(near_drafter().lm), **options)
    assert found.sequences == expected and is_replayed(found)
    assert not is_replayed(generate(lm, ModelDrafter(near_drafter().lm, vocab=range(50)), **options)), "another head"


@pytest.mark.slow
def test_what_was_captured_in_inference_mode_serves_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = captured(monkeypatch)
    with torch.inference_mode():
        expected = generate(lm, near_drafter(), budget=8).sequences
    for _ in range(2):
        assert generate(lm, near_drafter(), budget=8).sequences == expected


@pytest.mark.slow
def test_what_is_kept_needs_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = captured(monkeypatch)
    generate(lm, near_drafter(), budget=8)
    monkeypatch.setattr(room, "free_bytes", lambda device: 1)  # as where a device is nearly full
    assert is_replayed(generate(lm, near_drafter(), budget=8))
    with pytest.raises(ValueError, match="the states need"):
        generate(lm, near_drafter(), budget=9)


@pytest.mark.slow
def test_memory_that_runs_out_leaves_a_usable_target(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = captured(monkeypatch)
    generate(lm, near_drafter(), budget=4)
    with monkeypatch.context() as patch:
        patch.setattr(lm, "verify", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("tried 2 GiB")))
        with pytest.raises(stree.GenerationError, match="tried 2 GiB.*lower max_batch"):
            generate(lm, near_drafter(), budget=8)
    for budget in (8, 4):
        assert generate(lm, near_drafter(), budget=budget).sequences == (
            generate(launched(), near_drafter(), budget=budget).sequences
        )


def test_a_capture_that_fails_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate(launched(), near_drafter(), growth=Calibrated(3), budget=8).sequences
    lm = captured(monkeypatch)
    lm.defers_commit = True
    commit = type(lm).commit

    def failing(self: Any, *operands: Any) -> None:
        if self is lm and isinstance(_get_current_dispatch_mode(), Tape):
            raise RuntimeError("out of memory, say")
        commit(self, *operands)

    monkeypatch.setattr(type(lm), "commit", failing)
    found = generate(lm, near_drafter(), growth=Calibrated(3), budget=8)
    assert found.sequences == expected and "out of memory" in str(found.stats["graphs"]["not_captured"])
