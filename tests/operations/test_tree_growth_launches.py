"""Whole drafts grown by Triton kernels: the same trees as in torch, few launches a layer, and builds that sizes choose.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_tree_growth_launches.py
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from helpers.on_device import treat_as_on_device

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("launches are counted under Triton's interpreter", allow_module_level=True)

from helpers.draft_steps import GROWTHS
from helpers.fast_cases import slow_unless
from helpers.launch_keys import launch_keys
from helpers.on_device import NoHostReads
from helpers.tiny_models import patched, tiny_model

from benchmarks.ahead_of_time import step_counts
from benchmarks.ahead_of_time.launch_counter import LaunchCounter
from benchmarks.ahead_of_time.whole_step import as_on_a_gpu
from stree.drafters import ModelDrafter
from stree.drafters.model import ModelRun
from stree.growth import Calibrated, Growth
from stree.kernels.step.texts import Seen
from stree.sampling import Random, Sampling
from stree.verify import accept

PROMPTS = [[5, 6, 7, 8, 9, 3], [4, 4, 8, 1]]
NAMES = ("calibrated", "dyspec", "sequoia", "specinfer", "rsds", "opt-tree", "eagle2")  # grown by kernels
IN_CI = {("calibrated", 0.0), ("rsds", 0.8)}


def begun(growth: Growth, prompts: list[list[int]]) -> Any:
    """Begin a run of a draft model."""
    rng = Random(0, torch.arange(len(prompts)), torch.tensor([len(prompt) for prompt in prompts]))
    drafter = ModelDrafter(patched(tiny_model("mamba2", seed=1)))
    run = drafter.start(drafter.lm.vocab_size, prompts, rng)
    run.reserve(200, growth, 16, begins=True)
    return run


def drafts(growth: Growth, budget: int, steps: int) -> list[dict[str, Any]]:
    """Propose and observe some steps, whose target is made of random logits."""
    run, generator = begun(growth, PROMPTS), torch.Generator().manual_seed(3)
    texts, pending, found = [*PROMPTS], torch.tensor([7, 9]), list[dict[str, Any]]()
    for _ in range(steps):
        draft = run.propose(pending, growth, budget)
        tree, probs = draft.tree, draft.probs
        logits = torch.randn(*tree.tokens.shape, run.state._lm.vocab_size, generator=generator)
        logits = logits.scatter_add(2, tree.tokens.roll(-1, 1)[..., None], torch.full_like(logits[..., :1], 4.0))
        rng = Random(1, torch.arange(2), torch.zeros(2, dtype=torch.long))
        acceptance = accept(tree, logits, growth.sampling, rng, draft=probs)
        run.observe(acceptance)
        parts = zip(texts, tree.tokens, acceptance.path.long(), acceptance.path_lengths, strict=True)
        texts = [[*text, *tokens[path[:length]].tolist()] for text, tokens, path, length in parts]
        pending = acceptance.next_token
        names = ("tokens", "parents", "depths", "ancestor_mask")
        step = {name: getattr(tree, name) for name in names} | {"values": draft.values, "pending": pending}
        found.append(step if probs is None else step | {"row": probs.row, "kind": probs.kind})
    return found


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let shapes be as fixed as on a GPU."""
    treat_as_on_device(monkeypatch)


@pytest.mark.parametrize(
    ("name", "temperature"),
    slow_unless(lambda *case: False, product(NAMES, (0.0, 0.8)), in_ci=lambda *case: case in IN_CI),
)
def test_drafts_are_the_same_node_for_node(
    name: str, temperature: float, fixed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = GROWTHS[name]
    assert chosen is not None
    growth = chosen.bind(Sampling(temperature))
    expected = drafts(growth, 12, 3)
    treat_as_on_device(monkeypatch, triton=True)
    for step, (one, other) in enumerate(zip(drafts(growth, 12, 3), expected, strict=True)):
        for part, tensor in one.items():
            same = torch.allclose(tensor, other[part]) if part == "values" else torch.equal(tensor, other[part])
            assert same, (step, part)
    assert sum(int((step["parents"] >= 0).sum()) for step in expected) > 12


def launches_of(growth: Growth, budget: int) -> Counter[str]:
    """Count the launches of one proposal."""
    run: ModelRun = begun(growth, PROMPTS[:1])
    pending = torch.tensor([7])
    seen = Seen(torch.tensor([[*PROMPTS[0], 7]]), torch.tensor([len(PROMPTS[0])]), pending)  # as a step gives
    with as_on_a_gpu():
        run.state._state = None
        run.prepare(seen, budget)
        run.propose(pending, growth, budget)
        places = step_counts.Places()
        places.within(run.state._lm, "verify", "forward")
        counts = LaunchCounter(lambda: places.now)
        with counts.watching():
            run.propose(pending, growth, budget)
    return Counter({what: number for (part, what), number in counts.found.items() if part != "forward"})


# Launches a layer, the distribution's among them, and launches of the rest of a proposal.  They may fall and must not
# rise.  What reads a vocabulary is two launches, so that its blocks are read by programs of their own.
@pytest.mark.parametrize(
    ("temperature", "most", "most_besides"),
    slow_unless(lambda *_: False, [(0.0, 6, 8), (0.8, 7, 14)], in_ci=lambda *_: False),
)
def test_a_layer_takes_few_launches(temperature: float, most: int, most_besides: int) -> None:
    growths = [Calibrated(depth, ranks=4).bind(Sampling(temperature)) for depth in (2, 3)]
    short, deep = (launches_of(growth, 16) for growth in growths)
    each = deep.total() - short.total()
    assert each <= most, (each, deep - short)
    assert short.total() - 2 * each <= most_besides, short
    for name in (
        "probs_kernel",
        "choose_kernel",
        "append_kernel",
        "rank_kernel" if temperature == 0 else "table_kernel",
    ):
        assert (short[name], deep[name]) == (2, 3)


def test_launches_of_a_layer_depend_on_sizes_and_not_on_values(fixed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    treat_as_on_device(monkeypatch, triton=True)
    growth = Calibrated(2).bind(Sampling(0.8))
    keys = []
    for pending in (3, 8):
        run = begun(growth, PROMPTS[:1])
        with launch_keys(monkeypatch) as found, NoHostReads():
            run.propose(torch.tensor([pending]), growth, 8)
        keys.append(found)
    assert keys[0] == keys[1]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.slow
def test_budgets_of_equal_padded_sizes_share_their_builds(
    temperature: float, fixed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    treat_as_on_device(monkeypatch, triton=True)
    builds = []
    for budget, prompts in ((14, PROMPTS), (16, PROMPTS[:1]), (17, PROMPTS)):
        growth = Calibrated(2, ranks=4).bind(Sampling(temperature))
        run = begun(growth, prompts)
        with launch_keys(monkeypatch) as found:
            run.propose(torch.tensor([7] * len(prompts)), growth, budget)
        names = ("choose_kernel", "append_kernel", "cut_kernel", "rank_kernel", "table_kernel")
        builds.append({key for key in found if key[0] in names})
    assert builds[0] == builds[1] == builds[2]
