"""The engine: requests of different kinds join and leave, and each gets the text that it gets alone.

Run: python -m pytest tests/serving/test_engine.py
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from helpers.captured import launched, near_drafter
from helpers.engine_requests import LIMITS, PROMPTS, WAYS, alone, options, submit
from helpers.fast_cases import slow_unless
from helpers.tiny_heads import target_and_block_head, target_and_head

import stree
from stree.sampling import Sampling
from stree.serving import RequestHandle

# Growths whose trees differ in size from row to row.
IN_CI = ("fused", "rsds")


@pytest.mark.parametrize("name", slow_unless("suffix".__eq__, WAYS, in_ci=IN_CI.__contains__))
def test_every_request_gets_the_text_that_it_gets_alone(name: str) -> None:
    lm, way = launched(), WAYS[name]
    with stree.Engine(lm, way[0], **way[1], max_batch=3, max_length=96) as engine:
        handles = []
        for place in range(len(PROMPTS)):
            handles.append(submit(engine, place))
            if place % 3 == 0:
                next(iter(handles[0]))  # some join while others run
        texts = [handle.result(120).sequences[0] for handle in handles]
    assert texts == [alone(lm, way, place) for place in range(len(PROMPTS))]
    stats = engine.stats
    assert stats["requests"] == len(PROMPTS) and stats["new_tokens"] == sum(LIMITS) and stats["running"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_requests_with_a_draft_head_get_the_texts_that_they_get_alone(kind: str) -> None:
    lm, head = target_and_head("qwen3_next") if kind == "mtp" else target_and_block_head("qwen3_next", kind)
    drafter = stree.drafters.HeadDrafter(head)
    way = drafter, {"budget": 8}
    with stree.Engine(lm, drafter, budget=8, max_batch=3, max_length=96, prefill_chunk=4) as engine:
        texts = [handle.result(120).sequences[0] for handle in [submit(engine, place) for place in range(5)]]
    assert texts == [alone(lm, way, place) for place in range(5)]


def test_accepted_tokens_behind_the_end_of_a_text_are_not_counted() -> None:
    drafter = stree.drafters.ModelDrafter(launched())  # the target itself: everything is accepted
    with stree.Engine(launched(), drafter, growth="chain:4", budget=5) as engine:
        stats = submit(engine, 0, max_new_tokens=8).result(60).stats
        assert (stats["steps"], stats["tau"], stats["acceptance_by_depth"]) == (2, 5.0, [1.0] * 4)
        assert stats["accepted"] == engine.stats["accepted"] == 4 + 2, "8 tokens: 1, 5, and 2 of 5"


def test_drafted_nodes_are_those_of_a_text_s_own_trees() -> None:
    lm, own, drafter = launched(), [], stree.drafters.SuffixDrafter()  # whose trees differ in size from row to row
    for prompt in PROMPTS[:4]:
        out = stree.generate(lm, [prompt], drafter, budget=6, max_new_tokens=20, ignore_eos=True, return_steps=True)
        own.append(sum(len(step.tokens) - 1 for step in (out.steps or [[]])[0]))
    with stree.Engine(lm, drafter, budget=6, max_batch=4, max_length=96) as engine:
        handles = [engine.submit(prompt, max_new_tokens=20, ignore_eos=True) for prompt in PROMPTS[:4]]
        assert [handle.result(60).stats["drafted"] for handle in handles] == own and len({*own}) > 1


@pytest.mark.parametrize("cache_bytes", [0, 10**7])
def test_a_draft_model_has_read_the_prompts_of_all_texts_with_trees(cache_bytes: int) -> None:
    drafter = stree.drafters.ModelDrafter(launched())  # the target itself: everything is accepted
    sizes: Any = {"budget": 4, "max_batch": 3, "max_length": 96, "cache_bytes": cache_bytes}
    with stree.Engine(launched(), drafter, growth="chain:3", **sizes) as engine:
        handles = []
        for place in range(6):
            budget = 1 if place in (0, 3) else None  # others decode beside texts that are drafted, and before them
            handles.append(submit(engine, place, max_new_tokens=13, budget=budget))
            next(iter(handles[-1]))
        taus = [handle.result(60).stats["tau"] for handle in handles]
    assert taus == [1.0, 4.0, 4.0, 1.0, 4.0, 4.0]


@pytest.mark.slow
def test_many_threads_submit_and_cancel() -> None:
    lm, way = launched(), (near_drafter(), {"budget": 12})
    expected = [alone(lm, way, place) for place in range(len(PROMPTS))]

    def one(running: stree.Engine, number: int) -> bool:
        place = number % len(PROMPTS)
        handle = submit(running, place)
        if number % 5 == 4:
            for _ in zip(handle, range(2), strict=False):
                pass
            handle.cancel()
            return handle.tokens == expected[place][len(PROMPTS[place]) :][: len(handle.tokens)]
        return handle.result(120).sequences[0] == expected[place]

    with stree.Engine(lm, *way[:1], budget=12, max_batch=4, max_length=96) as engine, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(partial(one, engine), range(20)))
        deadline = time.monotonic() + 60
        while engine.stats["running"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.stats["running"] == 0


def test_a_conversation_runs_its_new_tokens_only() -> None:
    lm, way = launched(), (near_drafter(), {"budget": 12})
    with stree.Engine(lm, way[0], budget=12, max_batch=2, max_length=96, cache_bytes=10**8) as engine:
        first = engine.submit(PROMPTS[0], sampling=Sampling(0.8), max_new_tokens=11, ignore_eos=True)
        text = first.result(60).sequences[0]
        for prompt, num_cached in (
            (text + [7, 7], len(text) - 1),  # continues the answer
            (PROMPTS[0] + [90, 91], len(PROMPTS[0])),  # another answer to the same prompt
            (PROMPTS[0], len(PROMPTS[0])),  # the same again, all of it known
            ([1, *text], 0),
        ):
            second = engine.submit(prompt, max_new_tokens=9, ignore_eos=True)
            expected = stree.generate(lm, [prompt], way[0], budget=12, max_new_tokens=9, ignore_eos=True)
            assert second.result(60).sequences == expected.sequences
            assert second.stats["num_cached_tokens"] == num_cached


def test_a_request_whose_result_is_there_is_counted_and_runs_no_more() -> None:
    with stree.Engine(launched(), "none", budget=1, max_batch=2, max_length=96, cache_bytes=10**8) as engine:
        for number in range(1, 40):
            engine.submit(PROMPTS[number % 8], max_new_tokens=3, ignore_eos=True).result(60)
            stats = engine.stats
            assert (stats["running"], stats["new_tokens"]) == (0, 3 * number)


def test_states_are_kept_within_their_bytes() -> None:
    lm = launched()
    with stree.Engine(lm, budget=4, max_batch=1, max_length=96, cache_bytes=1) as engine:
        engine.submit([5, 6], max_new_tokens=3).result(60)
        again = engine.submit([5, 6], max_new_tokens=3)
        assert again.result(60).stats["num_cached_tokens"] == 0


def test_a_long_prompt_does_not_stall_running_requests() -> None:
    lm = launched()
    prompt = [3 + index % 90 for index in range(200)]
    with stree.Engine(lm, budget=1, max_batch=2, max_length=256, prefill_chunk=16) as engine:
        running = engine.submit([5, 6], max_new_tokens=60, ignore_eos=True)
        next(iter(running))
        late = engine.submit(prompt, max_new_tokens=3, ignore_eos=True)
        next(iter(late))
        assert len(running.tokens) >= 200 // 16
        assert late.result(60).sequences == stree.generate(lm, [prompt], max_new_tokens=3, ignore_eos=True).sequences


def test_coroutines_read_steps_with_logprobs_and_trees(engine: stree.Engine) -> None:
    async def read(place: int) -> tuple[RequestHandle, list[Any]]:
        handle = submit(engine, place, logprobs=2, trees=True)
        return handle, [step async for step in handle]

    async def both() -> Any:
        return await asyncio.gather(read(0), read(1))

    for place, (handle, steps) in enumerate(asyncio.run(both())):
        expected = stree.generate(launched(), [PROMPTS[place]], near_drafter(), budget=12, logprobs=2, **options(place))
        new = [token for step in steps for token in step.tokens]
        assert new == handle.tokens == expected.sequences[0][len(PROMPTS[place]) :]
        got, wanted = [one for step in steps for one in step.logprobs], (expected.logprobs or [])[0]
        assert [one.logprob for one in got] == pytest.approx([one.logprob for one in wanted], abs=1e-4)
        emitted = steps[0].tokens
        for step in steps[1:]:
            assert step.tree.tokens[0] == emitted[-1] and step.tree.path[0] == 0
            on_path = [step.tree.tokens[node] for node in step.tree.path[1:]]
            assert on_path[: len(step.tokens)] == step.tokens[: len(on_path)]
            emitted = step.tokens
        stats = handle.stats
        assert stats["num_new_tokens"] == len(new) and stats["steps"] == len(steps) - 1
        assert 0 <= stats["queue_s"] <= stats["first_token_s"] <= stats["total_s"]


@pytest.mark.parametrize("budget", [1, 12, "auto"])
def test_the_root_of_a_step_s_tree_is_the_token_before_it(budget: int | str) -> None:
    with stree.Engine(launched(), near_drafter(), budget=budget, max_batch=2, max_length=128) as engine:
        handles = [submit(engine, place, trees=True, max_new_tokens=30) for place in (0, 2)]
        for handle in handles:
            before, *steps = handle.steps()
            for step in steps:
                assert step.tree is not None and step.tree.tokens[0] == before.tokens[-1]
                before = step
