"""Other libraries' own generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.fast_cases import slow_unless
from helpers.tiny_models import tiny_model
from helpers.tiny_pairs import tiny_pair

from stree.bench.execute import Case, execute, figures
from stree.bench.methods import parse_methods
from stree.bench.peers import PeerRun, run_assistant, run_lookup, run_transformers


def test_transformers_generates_ragged_prompts_as_it_does_each_alone() -> None:
    pair = tiny_pair()
    prompts = [list(range(5, 12)), [20, 21]]
    together = run_transformers(pair, prompts, 6, 0.0, 0)
    assert together.ttft_s is None  # its streamers take one prompt
    for prompt, tokens in zip(prompts, together.tokens, strict=True):
        alone = run_transformers(pair, [prompt], 6, 0.0, 0)
        assert alone.tokens == [tokens] and alone.ttft_s is not None and alone.ttft_s > 0


@pytest.mark.parametrize("mode", [run_lookup, run_assistant])
def test_assisted_modes_of_transformers_generate_its_text(mode: Callable[..., PeerRun]) -> None:
    pair = tiny_pair("llama")
    pair.plain_drafter = tiny_model("llama", pair.target.dtype)  # the target itself: everything is accepted
    prompt = [5, 6, 7, 8] * 3
    wanted = run_transformers(pair, [prompt], 24, 0.0, 0)
    found = mode(pair, [prompt], 24, 0.0, 0, drafted=4)
    assert found.tokens == wanted.tokens and wanted.accepted is None
    assert found.accepted is not None and max(found.accepted) <= 4
    if mode is run_assistant:
        assert found.accepted == [4] * 4, "the pass of the prompt is not counted, the last one before it is cut"


@pytest.mark.parametrize("new_tokens", slow_unless((21).__eq__, [21, 24, 26]))
def test_tau_is_the_same_for_ours_and_transformers_wherever_a_text_is_cut(new_tokens: int) -> None:
    pair = tiny_pair("llama")
    pair.drafter, pair.plain_drafter = pair.target, tiny_model("llama", pair.target.dtype)
    case = Case(((5, 6, 7, 8) * 3,), new_tokens, 0.0)
    runs = [execute(pair, method, case) for method in parse_methods("chain:4,transformers-assistant:4,transformers")]
    assert runs[0].tokens == runs[1].tokens == runs[2].tokens and len(runs[1].tokens[0]) == new_tokens
    found = [figures(run) for run in runs]
    assert [one["tau"] for one in found] == [5.0, 5.0, 1.0]
    assert [one["acceptance_by_depth"] for one in found] == [[1.0] * 4, [1.0] * 4, []]
    assert [one["rows"][0]["tau"] for one in found] == [5.0, 5.0, 1.0]


@pytest.mark.parametrize(
    ("family", "prompts", "message"), [("mamba2", [[5, 6]], "recurrent state"), ("llama", [[5, 6], [7]], "one prompt")]
)
def test_what_transformers_cannot_assist_is_refused(family: str, prompts: Any, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        run_lookup(tiny_pair(family), prompts, 4, 0.0, 0, drafted=4)
    with pytest.raises(NotImplementedError, match="--drafter"):
        run_assistant(tiny_pair(family, drafter=False), prompts, 4, 0.0, 0, drafted=4)
