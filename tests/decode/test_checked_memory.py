"""The memory that is checked before a generation is the memory that it takes.

Run: python -m pytest tests/decode/test_checked_memory.py
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from helpers.captured import captured
from helpers.fast_cases import slow_unless
from helpers.grammars import letters_tokenizer
from helpers.on_device import PeakMemory
from helpers.tiny_family_models import family_model, matrix
from helpers.tiny_heads import save_slot_head
from transformers import AutoModelForCausalLM, Lfm2Config, LlamaConfig

import stree
from stree import generation
from stree.decode import memory
from stree.decode.memory import Extent
from stree.distill.heads import new_head
from stree.drafters import Drafter, FusedDrafter, HeadDrafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.growth import DySpec, Static
from stree.kernels.dispatch import as_on_device
from stree.models import measured_bytes, passed_checks, tree_memory
from stree.models.tree_memory import tree_bytes
from stree.sampling import Sampling

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320,
}  # fmt: skip
MODELS = {
    "attention": LlamaConfig(**SIZES),
    "convolutions": Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv"]),
}
OF_EACH_KIND = ("bamba", "mamba", "qwen3_5_text", "recurrent_gemma", "lfm2", "llama")
OF_EACH_PREFILL = ("bamba", "recurrent_gemma", "lfm2_moe", "kimi_linear")


def test_sizes_up_to_the_next_powers_of_two_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, measured = stree.TreeLM(family_model("bamba")), list[Any]()
    monkeypatch.setattr(measured_bytes, "_from_disk", lambda key, lm, measure: measured.append(key) or 0)  # type: ignore[func-returns-value]
    numbers = []
    for batch, budget in ((3, 5), (4, 8), (3, 7), (5, 8)):
        stree.generate(lm, [[5, 6, 7]] * batch, SuffixDrafter(), budget=budget, max_new_tokens=2, max_length=40)
        numbers.append(len(measured))
    assert 0 < numbers[0] == numbers[1] == numbers[2] < numbers[3]


@pytest.mark.parametrize("family", matrix(fast=OF_EACH_KIND))
def test_states_of_captured_steps_are_as_large_as_was_checked(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Extent] = []
    max_length = 300 if family == "bamba" else 4200
    check = memory.check_memory
    monkeypatch.setattr(generation, "check_memory", lambda *given: (checked.append(given[2]), check(*given))[1])  # type: ignore[func-returns-value]
    lm = captured(monkeypatch, stree.TreeLM(family_model(family)))
    stree.generate(lm, [[5, 6], [7]], SuffixDrafter(), budget=8, max_new_tokens=2, max_length=max_length)
    (kept,) = lm.cache["step_cache"].report()
    found = memory.state_bytes(lm, kept["batch"], checked[0].length, checked[0].nodes)
    assert 0.95 < found / kept["state_bytes"] < 1.05
    assert max_length + 8 <= kept["max_length"] <= max(512, 1.25 * (max_length + 8))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("batch", "length"), [(2, 512), (8, 32)])
def test_a_prefill_takes_as_much_as_was_checked(name: str, batch: int, length: int) -> None:
    assert_prefill_is_checked(stree.TreeLM(AutoModelForCausalLM.from_config(MODELS[name]).eval()), [length] * batch)


@pytest.mark.parametrize("family", matrix(fast=OF_EACH_PREFILL, in_ci=("jamba", "zamba2", "gemma3_text")))
def test_a_prefill_of_every_family_takes_as_much_as_was_checked(family: str) -> None:
    assert_prefill_is_checked(stree.TreeLM(family_model(family)), [128, 90])


@pytest.mark.parametrize("family", matrix(fast=("bamba", "llama"), in_ci=("qwen3_next",)))
def test_a_prefill_in_chunks_takes_as_much_as_was_checked(family: str) -> None:
    lm = stree.TreeLM(family_model(family))
    lm.chunk_size = 128
    assert_prefill_is_checked(lm, [512])


def assert_prefill_is_checked(lm: stree.TreeLM, lengths: list[int]) -> None:
    batch, longest = len(lengths), max(lengths)
    with PeakMemory() as memory_of:
        state = lm.new_state(batch, longest + 16, 16)
        lm.prefill(state, torch.zeros(batch, longest, dtype=torch.long), torch.tensor(lengths))
    is_padded = len(set(lengths)) > 1
    extent = Extent(batch, longest + 16, 16, batch, longest, is_padded=is_padded, is_greedy=True)
    needed = memory.needed_bytes(lm, NoDrafter(), extent)
    assert needed == pytest.approx(memory_of.peak, rel=0.05, abs=2**19)  # scans in slices hold their outputs twice


@pytest.mark.parametrize("family", matrix(fast=OF_EACH_KIND))
def test_a_forward_over_a_tree_takes_as_much_as_was_checked(family: str) -> None:
    batch, nodes, length = 2, 16, 300
    lm = stree.TreeLM(family_model(family))
    state = lm.new_state(batch, length, nodes)
    lm.prefill(state, torch.zeros(batch, length - 2, dtype=torch.long))
    tree = stree.TokenTree(torch.zeros(nodes, dtype=torch.long).repeat(batch, 1), STAR.repeat(batch, 1))
    assert tree.depths.max() == tree.ancestor_mask.sum(-1).max() - 1  # which are computed when they are first read
    peaks = []
    for scope in (as_on_device(triton=False), nullcontext()):  # the reference; numba's code, which takes less
        with scope, PeakMemory() as memory_of:
            lm.verify(state, tree)
        peaks.append(memory_of.peak)
    assert tree_bytes(lm, batch, nodes, length) == pytest.approx(peaks[0], rel=0.05) and peaks[1] <= 1.05 * peaks[0]


STAR = torch.tensor([-1] + [0] * 15)


def test_kernels_take_less_than_the_reference_and_the_same_at_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = stree.TreeLM(family_model("bamba"))
    on_cpu = tree_bytes(lm, 2, 16, 4096)
    monkeypatch.setattr(stree.TreeLM, "device", torch.device("cuda"))
    on_gpu = tree_bytes(lm, 2, 16, 4096)
    logits = 2 * 16 * lm.vocab_size * 4
    assert logits < on_gpu == tree_bytes(lm, 2, 16, 64) < on_cpu


RULES: dict[str, Any] = {
    "logit_bias": {3: 1.0}, "repetition_penalty": 1.2, "presence_penalty": 0.5, "bad_words": [[1, 2], [4]],
    "min_new_tokens": 3, "stop_token_ids": [3],
}  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz"  # as many tokens as a tree has nodes, and more
GRAMMAR: dict[str, Any] = {"grammar": stree.Grammar.regex("[a-z]{30}"), "tokenizer": letters_tokenizer(LETTERS)}


@pytest.mark.parametrize(
    ("has_drafter", "sampling", "options"),
    slow_unless(
        lambda has_drafter, sampling, options: options is RULES,
        [
            (False, Sampling(), {"logprobs": 3}),
            (False, Sampling(0.8), RULES),
            (True, Sampling(0.8, top_p=0.9), {"logprobs": 3, **RULES}),
            (False, Sampling(), GRAMMAR),
            (False, Sampling(0.8), GRAMMAR | RULES),
            (True, Sampling(0.8, top_p=0.9), {"logprobs": 3, **GRAMMAR}),
            (True, Sampling(0.8), GRAMMAR | RULES),
            (True, Sampling(), GRAMMAR | RULES),
            (True, Sampling(), GRAMMAR),
            (True, Sampling(), {"growth": DySpec(form="heap")}),
            (True, Sampling(0.8), {"growth": DySpec(form="heap")}),
        ],
        in_ci=lambda has_drafter, sampling, options: has_drafter and sampling.top_p and "grammar" in options,
    ),
)  # fmt: skip
def test_log_probabilities_token_rules_and_grammars_take_what_was_checked(
    has_drafter: bool, sampling: Sampling, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0.98 < needed_over_peak(has_drafter, sampling, torch.float32, monkeypatch, **options) < 1.05


WAYS = [
    (False, Sampling(), "auto"), (False, Sampling(0.8), "auto"), (True, Sampling(), "auto"),
    (True, Sampling(0.8), "auto"), (True, Sampling(0.8), "match"), (True, Sampling(0.8, top_p=0.9), "auto"),
    (True, Sampling(0.8), "rejection"),
]  # fmt: skip


def in_ci(way: tuple[bool, Sampling, str], dtype: torch.dtype, options: dict[str, Any]) -> bool:
    return options is not RULES and (WAYS.index(way), dtype) in ((2, torch.float32), (3, torch.bfloat16))


@pytest.mark.parametrize(
    ("way", "dtype", "options"),
    slow_unless(
        lambda *_: False, product(WAYS, (torch.float32, torch.bfloat16), ({"logprobs": 3}, RULES)), in_ci=in_ci
    ),
)
def test_steps_over_a_large_vocabulary_take_what_was_checked(
    way: tuple[bool, Sampling, str], dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_drafter, sampling, verifier = way
    assert 0.98 < needed_over_peak(has_drafter, sampling, dtype, monkeypatch, verifier=verifier, **options) < 1.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sampling"), [("eagle3", Sampling(0.8)), ("dflash", Sampling()), ("diffusion", Sampling(0.8))]
)
def test_steps_with_a_head_take_what_was_checked(
    kind: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0.95 < needed_over_peak(kind, sampling, torch.float32, monkeypatch) < 1.05


@pytest.mark.parametrize(
    "growth", slow_unless(lambda _: False, [None, Static((2, 2, 2))], in_ci=lambda growth: growth is not None)
)
def test_steps_with_blocks_of_slots_take_what_was_checked(
    growth: Static | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0.98 < needed_over_peak("specblock", Sampling(), torch.float32, monkeypatch, growth=growth) < 1.02


@pytest.mark.slow
def test_steps_of_two_drafters_take_what_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0.98 < needed_over_peak("fused", Sampling(0.8), torch.float32, monkeypatch) < 1.05


HAS_MODEL = (False, True, "fused")


def needed_over_peak(
    has_drafter: bool | str, sampling: Sampling, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> float:
    """Generate over a large vocabulary; return the memory that is checked over what is taken.

    Layers of a greedy draft have their full widths, as on a device: a host that reads values leaves out empty columns.
    """
    checked: list[Any] = []
    monkeypatch.setenv("STREE_DEBUG", "")  # under which the logits of a step are kept
    monkeypatch.setattr(generation, "check_memory", lambda *given: checked.append(given))
    target, draft = (
        stree.TreeLM(family_model("mamba2" if has_drafter in HAS_MODEL else "bamba", dtype, seed, vocab_size=20_000))
        for seed in (0, 1)
    )
    drafter: Drafter = ModelDrafter(draft) if has_drafter else NoDrafter()
    if has_drafter == "fused":
        drafter = FusedDrafter(SuffixDrafter(), drafter)
    elif isinstance(has_drafter, str):
        folder = Path(mkdtemp())
        if has_drafter == "specblock":
            save_slot_head(folder, target)
        else:
            new_head(target, has_drafter, 0).save(folder)
        drafter = HeadDrafter(stree.heads.load(folder, target))
    options |= {"sampling": sampling, "budget": 16 if has_drafter else 1}
    behaviour = as_on_device(triton=False) if has_drafter and sampling.is_greedy else nullcontext()
    with behaviour:
        with PeakMemory() as memory_of:
            stree.generate(target, [[5, 6, 7]] * 3, drafter, max_new_tokens=8, max_length=64, **options)
        return float(memory.needed_bytes(*checked[0]) / memory_of.peak)


def test_a_prompt_that_does_not_fit_beside_its_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = stree.TreeLM(AutoModelForCausalLM.from_config(MODELS["attention"]).eval())
    prompt, state = [[1] * 512], memory.state_bytes(lm, 1, 512 + 8 + 1, 1)
    monkeypatch.setattr(memory, "free_bytes", lambda _: 3 * state)
    with pytest.raises(ValueError, match=r"the states need .* in a prefill or a step, .* are free"):
        stree.generate(lm, prompt, budget=1, max_new_tokens=8)
    lm.chunk_size = 64  # a part of a prompt at a time
    assert len(stree.generate(lm, prompt, budget=1, max_new_tokens=8).sequences[0]) == 520


def test_another_process_reads_what_was_measured_until_the_code_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lm, measure = stree.TreeLM(AutoModelForCausalLM.from_config(MODELS["attention"]).eval()), tree_memory._measure
    measurements: list[Any] = []
    monkeypatch.setattr(tree_memory, "_measure", lambda *given: (measurements.append(given), measure(*given))[1])  # type: ignore[func-returns-value]

    def in_another_process() -> int:
        lm.cache.clear()
        return tree_bytes(lm, 1, 4, 64)

    first = in_another_process()
    num_measured = len(measurements)
    assert in_another_process() == first
    assert len(measurements) == num_measured > 0
    monkeypatch.setattr(passed_checks, "_hash", lambda *_: "of other code")
    assert in_another_process() == first
    assert len(measurements) == 2 * num_measured
