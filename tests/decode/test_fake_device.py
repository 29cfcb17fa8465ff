"""Whole generations on CUDA tensors without values: no step mixes devices, reads a value or waits for the device.

Run: python -m pytest tests/decode/test_fake_device.py -m "slow or not slow"  # 8 minutes of one core
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from helpers.draft_steps import GROWTHS
from helpers.fake_cuda import Devices, fake_cuda, on_fake_cuda
from helpers.fast_cases import slow_unless
from helpers.tiny_family_models import EVERY_ADAPTER, FAMILIES, family_model
from helpers.tiny_heads import save_block_head, save_slot_head
from torch import Tensor

import stree
from stree.distill.heads import new_head
from stree.drafters import Draft, Drafter, DraftRun, FusedDrafter, HeadDrafter, ModelDrafter, SuffixDrafter, overlapped
from stree.growth import Chain, Growth
from stree.kernels.step.indices import tree_indices
from stree.sampling import Random, Sampling
from stree.tree import TokenTree
from stree.verify import Acceptance

TEXTS = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]]
Prepared = Callable[[stree.TreeLM], Drafter]  # makes a drafter for a target on the fake device


def model_drafter(target: stree.TreeLM) -> Prepared:
    model = family_model("mamba2", torch.bfloat16, 1, vocab_size=target.vocab_size)
    return lambda lm: ModelDrafter(stree.TreeLM(on_fake_cuda(model)))


def fused_drafter(target: stree.TreeLM) -> Prepared:
    model = model_drafter(target)
    return lambda lm: FusedDrafter(model(lm), SuffixDrafter())


def slot_head(target: stree.TreeLM) -> Prepared:
    folder = Path(mkdtemp())
    save_slot_head(folder, target)
    return lambda lm: HeadDrafter(stree.heads.load(folder, lm))


def block_head(kind: str, target: stree.TreeLM) -> Prepared:
    folder = save_block_head(mkdtemp(), target, kind)
    return lambda lm: HeadDrafter(stree.heads.load(folder, lm))


def trained_head(kind: str, target: stree.TreeLM) -> Prepared:
    folder = Path(mkdtemp())
    new_head(target, kind, 0).save(folder)
    return lambda lm: HeadDrafter(stree.heads.load(folder, lm))


DRAFTERS: dict[str, Callable[[stree.TreeLM], Prepared]] = {
    "model": model_drafter,
    "fused": fused_drafter,
    "slots": slot_head,
    **{kind: partial(block_head, kind) for kind in ("dflash", "dflash2", "dspark")},
    **{kind: partial(trained_head, kind) for kind in ("mtp", "eagle3", "diffusion")},
    "suffix": lambda target: lambda lm: SuffixDrafter(),
}
# Which nodes of both trees are kept is decided on the host, from copies that arrive in pinned memory; how many tokens
# the model has not run is read.
ON_HOST = ("fused",)


def cover() -> Iterator[tuple[str, str, str, float]]:
    """Yield families, drafters, growths and temperatures so that every pair of values of any two of them occurs.

    Such a cover of pairs stands for the product, 17 times as many cases: a family is run by the target alone, and what
    is drafted for it depends on drafter, growth and temperature, of which every three occur together, too.  Retrieval
    takes chains.
    """
    grown = [name for name in DRAFTERS if name != "suffix"]
    for place, family in enumerate(FAMILIES):
        for step, growth in enumerate([*GROWTHS][1:], place):
            yield family, grown[step % len(grown)], growth, (0.0, 0.8)[step // len(grown) % 2]
        yield family, "suffix", "chain", (0.0, 0.8)[place % 2]


CASES = [*cover()]


def test_the_cases_cover_every_pair() -> None:
    drafts = {
        (drafter, growth)
        for drafter in DRAFTERS
        for growth in [*GROWTHS][1:]
        if drafter != "suffix" or growth == "chain"
    }
    families, temperatures = {*FAMILIES}, {0.0, 0.8}
    assert {case[1:] for case in CASES} == {(*draft, temperature) for draft in drafts for temperature in temperatures}
    for place, values in ((1, {*DRAFTERS}), (2, {*GROWTHS} - {"none"}), (3, temperatures)):
        assert {(case[0], case[place]) for case in CASES} == {*product(families, values)}


def is_fast(family: str, drafter: str, growth: str, temperature: float) -> bool:
    return family == "jamba" and growth == "chain"


def in_ci(family: str, drafter: str, growth: str, temperature: float) -> bool:
    """Whether a case is of one family and every second growth, or the one of an adapter's family."""
    own = [*GROWTHS][1:][FAMILIES.index(family) % (len(GROWTHS) - 1)]
    place = [*GROWTHS].index(growth)
    return (family == "llama" and place % 2 == 0) or (family in EVERY_ADAPTER and growth == own)


@pytest.mark.parametrize(("family", "drafter", "growth", "temperature"), slow_unless(is_fast, CASES, in_ci=in_ci))
def test_a_step_reads_nothing_and_sends_nothing(
    family: str, drafter: str, growth: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = generated(monkeypatch, drafter, family, growth=GROWTHS[growth], sampling=Sampling(temperature))
    assert devices.launches
    for transfers in devices.transfers[1:]:  # the first step may bring constants to the device
        assert [note.partition(":")[0] for note in transfers] in (
            [],
            ["read at kernels/dispatch.py"] * (drafter in ON_HOST),
        )


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"budget": 1},
    "auto": {"budget": "auto"},
    "a row after the other": {"max_batch": 1, "max_length": 64, "sampling": [Sampling(), Sampling(0.8, top_k=5)]},
    "log probabilities": {"logprobs": 3, "sampling": Sampling(0.8, top_p=0.9, min_p=0.1)},
    "token rules": {
        "logit_bias": {3: 1.0}, "repetition_penalty": 1.2, "presence_penalty": 0.5, "bad_words": [[1, 2], [4]],
        "min_new_tokens": 3, "ignore_eos": False, "stop_token_ids": [3], "sampling": Sampling(0.8),
    },
    "rejection": {"verifier": "rejection", "sampling": Sampling(0.8), "return_steps": True},
    "block": {"verifier": "block", "growth": Chain(3), "sampling": Sampling(0.8)},
    "match": {"verifier": "match", "sampling": Sampling(0.8)},
}  # fmt: skip


@pytest.mark.parametrize("option", slow_unless("match".__eq__, OPTIONS))
def test_options(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = generated(monkeypatch, "model", **OPTIONS[option])
    assert devices.launches
    sent = [each.rpartition(":")[0] for step in devices.transfers[1:] for each in step]
    is_second = "max_batch" in OPTIONS[option]  # a draft model reads the second prompt before its first tree
    assert sent == ["_to_copy of [1, 6] at models/tree_lm.py"] * is_second


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bamba", "nemotron_h"])
def test_fused_mixers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stree.TreeLM, "fused_mixers", True)
    devices = generated(monkeypatch, "model", family)
    assert 0 < devices.launches["conv_kernel"] < devices.launches["ssd_kernel"]
    assert not any(devices.transfers[1:])


@pytest.mark.slow
def test_overlap_reads_whether_its_guess_was_right(monkeypatch: pytest.MonkeyPatch) -> None:
    class Inline:  # fake tensors belong to one thread
        def __init__(self, *args: Any, **options: Any) -> None: ...
        def submit(self, work: Callable[[], Any]) -> Future[Any]:
            done: Future[Any] = Future()
            done.set_result(work())
            return done

    monkeypatch.setattr(overlapped, "ThreadPoolExecutor", Inline)
    devices = generated(monkeypatch, "model", overlap=True)
    for transfers in devices.transfers[1:]:
        assert [note.partition(":")[0] for note in transfers] == ["read at drafters/overlapped.py"]


class Faulty(Drafter):
    """Plain decoding with a fault in its steps."""

    def __init__(self, fault: Callable[[Tensor], object]) -> None:
        self.fault = fault

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> DraftRun:
        class Run(DraftRun):
            def propose(run, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
                self.fault(pending)
                return Draft(
                    TokenTree.unchecked(pending[:, None], torch.full_like(pending, -1).int()[:, None]), None, 0
                )

            def observe(run, acceptance: Acceptance) -> None: ...

        return Run()


def host_parents(tokens: Tensor) -> object:
    mask = torch.zeros(2, 3, 3, dtype=torch.bool, device=tokens.device)
    return tree_indices(torch.zeros(2, 3, dtype=torch.int32), mask, 4)


FAULTS: list[tuple[Callable[[Tensor], object], str]] = [
    (lambda tokens: tokens + torch.arange(2), "found .*two.* devices"),
    (lambda tokens: tokens[tokens > 0], "nonzero"),
    (host_parents, "tree_kernel is launched with tensors of the host: .'parents_ptr'"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_a_fault_fails(fault: Callable[[Tensor], object], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(stree.GenerationError, match=message):
        generated(monkeypatch, lambda target: lambda lm: Faulty(fault))


WAITS: list[Callable[[Tensor], object]] = [
    lambda tokens: tokens.tolist(),
    lambda tokens: torch.zeros(2).to(tokens.device),
    lambda tokens: tokens.cpu(),
    lambda tokens: torch.zeros(2, dtype=torch.long).copy_(tokens),
]


@pytest.mark.parametrize("fault", WAITS)
def test_what_a_step_would_wait_for_is_noted(
    fault: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(generated(monkeypatch, lambda target: lambda lm: Faulty(fault)).transfers)


def generated(monkeypatch: pytest.MonkeyPatch, drafter: Any, family: str = "bamba", **options: Any) -> Devices:
    """Generate a few tokens of two texts; return what the devices have seen."""
    target = stree.TreeLM(family_model(family, torch.bfloat16))
    prepared = (DRAFTERS[drafter] if isinstance(drafter, str) else drafter)(target)
    with fake_cuda(monkeypatch) as devices:
        lm = stree.TreeLM(on_fake_cuda(target.release()))
        lm.captures_steps = False
        options = {"budget": 12, "max_new_tokens": 4, "ignore_eos": True, **options}
        assert stree.generate(lm, TEXTS, prepared(lm), **options).stats["steps"] >= 3
    return devices
