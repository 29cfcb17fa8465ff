"""The run: tune, check, measure, write; what is finished stays finished.

All methods run a batch of prompts before the next begins, in an order that turns with every batch and repeat, so that a
machine's drift hits all alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stree.bench.check import check_method, judge, reason_of
from stree.bench.directory import Key, RunDirectory
from stree.bench.execute import Case, Run, execute
from stree.bench.measures import make_record
from stree.bench.methods import Method, parse_methods
from stree.bench.pair import Pair
from stree.bench.plan import Block, Settings, Suite, finished_keys, plan_blocks
from stree.bench.records import Record, quantiles
from stree.bench.verdict import divergence
from stree.decode.step_cache import engine_of, rounded

__all__ = ["Runner"]

(PLAIN,) = parse_methods("plain")


class Runner:
    """One run of ``stree bench``.

    Args:
        pair: the models.
        methods: to compare.
        suites: prompts.
        settings: how they are run.
        directory: where records go.
        base: what every record holds: bench, dtype, env, threads.
        say: prints a line above the progress bar.
        advance: called after every run of a method, with the number of runs that it stands for.
    """

    def __init__(
        self,
        pair: Pair,
        methods: Sequence[Method],
        suites: Sequence[Suite],
        settings: Settings,
        directory: RunDirectory,
        *,
        base: Record,
        say: Callable[[str], None],
        advance: Callable[[int], None],
    ) -> None:
        self.pair, self.methods, self.suites, self.settings = pair, list(methods), list(suites), settings
        self.directory, self.base, self.say, self.advance = directory, base, say, advance
        self.blocks = plan_blocks(suites, settings)
        self._shapes: set[tuple[int, int]] = set()  # of the texts so far: sequences and room
        directory.keep(finished_keys(self.blocks, self.methods, directory.records))

    @property
    def num_runs(self) -> int:
        """Runs of a method on a batch that are planned in all, checks not counted."""
        return len(self.blocks) * len(self.methods) * self.settings.repeats

    def run(self) -> None:
        """Do what is not done yet."""
        finished = finished_keys(self.blocks, self.methods, self.directory.records)
        self.advance(len(finished) * len(self.methods) * self.settings.repeats)
        for suite in self.suites:
            for temperature in self.settings.temperatures:
                todo = [
                    (number, block)
                    for number, block in enumerate(self.blocks)
                    if (block.key[0], block.key[3]) == (suite.name, temperature) and block.key not in finished
                ]
                if todo:
                    methods = [self._tuned(method, suite, temperature) for method in self.methods]
                    runnable = self._checked(methods, suite, temperature)
                    for number, block in todo:
                        runnable = self._measure(block, number, runnable)

    def _tuned(self, method: Method, suite: Suite, temperature: float) -> Method:
        """Choose a chain's depth on held-out prompts, once for a suite and temperature."""
        if not method.depths:
            return method
        params = {"suite": suite.name, "temperature": temperature}
        for record in self.directory.find("tuning", **params):
            if record["provider"] == method.name:
                return method.with_depth(record["depth"])
        speed: dict[int, list[float]] = {depth: [] for depth in method.depths}
        try:
            for number, prompt in enumerate((suite.held_out[0], *suite.held_out)):  # the first warms up
                case = self._case([self.pair.encode(prompt.turns[:1], chat=self.settings.chat)], temperature, 0)
                for depth in method.depths:
                    run = execute(self.pair, method.with_depth(depth), case)
                    if number:
                        speed[depth].append(run.seconds)
        except Exception:  # the check reports what is wrong
            return method.with_depth(method.depths[0])
        total = {depth: sum(seconds) for depth, seconds in speed.items()}
        depth = min(total, key=lambda depth: total[depth])
        tokens = self.settings.max_new_tokens * len(suite.held_out)
        record = self._record("tuning", method, params, depth=depth, is_held_out=suite.is_held_out)
        record["tokens_per_s_by_depth"] = {str(depth): tokens / seconds for depth, seconds in total.items()}
        self.directory.add([record])
        where = "held-out prompts" if suite.is_held_out else "the measured prompts: the file has no others"
        self.say(f"{suite.name}, T {temperature:g}: {method.name} is tuned to depth {depth} on {where}")
        return method.with_depth(depth)

    def _checked(self, methods: Sequence[Method], suite: Suite, temperature: float) -> list[Method]:
        """Compare outputs before timing, which warms up too; leave out what fails or cannot run."""
        runnable = []
        params = {"suite": suite.name, "temperature": temperature}
        known = {record["provider"]: record for record in self.directory.find("check", **params)}
        prompts = [
            self.pair.encode(prompt.turns[:1], chat=self.settings.chat)
            for prompt in suite.prompts[: self.settings.check]
        ]
        cases = [self._case([prompt], temperature, 0) for prompt in prompts if self._fits([prompt])]
        for method in methods:
            if method.name in known and known[method.name]["status"] != "ok":
                continue
            verdict = check_method(self.pair, method, cases, self.settings.law_texts)
            if method.name not in known:
                self.directory.add([self._record("check", method, params, **verdict)])
            if verdict["status"] == "ok":
                runnable.append(method)
            else:
                self.say(f"{suite.name}, T {temperature:g}: {method.name} {describe(verdict)}; it is not timed")
        return runnable

    def _measure(self, block: Block, number: int, methods: list[Method]) -> list[Method]:
        """Run all methods on one block, interleaved, and write their records; return those that can go on."""
        prompts = self._contexts(block)
        planned = len(self.methods) * self.settings.repeats
        if not self._fits(prompts):
            reason = f"a prompt and {self.settings.max_new_tokens} new tokens exceed {self.pair.target.max_length}"
            self.directory.add([self._record("skipped", PLAIN, block.params, reason=reason)])
            self.say(f"{block.key[0]}: prompts {block.params['prompts']} are left out: {reason}")
            self.advance(planned)
            return methods
        self._keep_programs(prompts)
        runs: dict[str, list[Run]] = {method.name: [] for method in methods}
        failed: list[Record] = []
        for repeat in range(self.settings.repeats):
            start = (number + repeat) % max(len(methods), 1)
            case = self._case(prompts, block.key[3], repeat)
            for method in methods[start:] + methods[:start]:
                try:
                    if method.name in runs:
                        runs[method.name].append(execute(self.pair, method, case))
                except Exception as error:  # one method's failure is its own
                    del runs[method.name]
                    params = {"suite": block.key[0], "temperature": block.key[3]}
                    verdict = {"status": "unavailable", "reason": reason_of(error)}
                    failed.append(self._record("check", method, params, **verdict))
                    self.say(f"{block.key[0]}: {method.name} {describe(verdict)}; it is not timed any more")
                self.advance(1)
        self.advance(planned - len(methods) * self.settings.repeats)
        going = [method for method in methods if method.name in runs]
        self.directory.add([*failed, *(self._timed(block, method, runs, prompts) for method in going)])
        return going

    def _keep_programs(self, prompts: Sequence[Sequence[int]]) -> None:
        """Where steps are captured, let the target keep what all methods need that run texts like these by turns."""
        engine = engine_of(self.pair.target)
        if engine is not None:
            self._shapes.add((len(prompts), rounded(max(map(len, prompts)) + self.settings.max_new_tokens)))
            engine.most = max(engine.most, len(self.methods) * len(self._shapes))

    def _timed(
        self, block: Block, method: Method, runs: dict[str, list[Run]], prompts: Sequence[Sequence[int]]
    ) -> Record:
        """Write one method's runs of a block down."""
        temperature = block.key[3]
        mine = runs[method.name]
        case = self._case(prompts, temperature, 0)
        params = {**block.params, **self._params(method)}
        record = self._record("tokens_per_s", method, params, unit="tokens/s")
        tokens = len(prompts) * self.settings.max_new_tokens
        record |= quantiles([tokens / run.seconds for run in mine])
        record |= make_record(mine) | judge(self.pair, method, case, mine, runs)
        if method.name == "plain":
            record |= divergence(self.pair, case, mine[0].tokens)
        return record

    def _contexts(self, block: Block) -> list[list[int]]:
        """Make the prompts of a block; a later turn has plain decoding's answers to the earlier ones in context."""
        suite, batch, turn, temperature = block.key
        answers: dict[int, list[list[int]]] = {prompt.index: [] for prompt in block.prompts}
        for earlier in range(turn):
            for index, answer in self._answers((suite, batch, earlier, temperature)).items():
                if index in answers:
                    answers[index].append(answer)
        return [
            self.pair.encode(prompt.turns[: turn + 1], answers[prompt.index], chat=self.settings.chat)
            for prompt in block.prompts
        ]

    def _answers(self, key: Key) -> dict[int, list[int]]:
        """Give plain decoding's answers in a block: those on record, else made now."""
        suite, batch, turn, temperature = key
        known = self.directory.find("tokens_per_s", suite=suite, batch=batch, turn=turn, temperature=temperature)
        for record in known:
            if record["provider"] == "plain":
                return dict(zip(record["params"]["prompts"], record["tokens"][0], strict=True))
        block = next(block for block in self.blocks if block.key == key)
        run = execute(self.pair, PLAIN, self._case(self._contexts(block), temperature, 0))
        return dict(zip(block.params["prompts"], run.tokens, strict=True))

    def _fits(self, prompts: Sequence[Sequence[int]]) -> bool:
        """Tell whether the target has positions enough."""
        most = self.pair.target.max_length
        return most is None or max(map(len, prompts)) + self.settings.max_new_tokens <= most

    def _case(self, prompts: Sequence[Sequence[int]], temperature: float, repeat: int) -> Case:
        """Make what a method is run on."""
        rows = tuple(tuple(prompt) for prompt in prompts)
        return Case(rows, self.settings.max_new_tokens, temperature, self.settings.seed + repeat)

    def _params(self, method: Method) -> Record:
        """Name the method's own settings."""
        growth = None if method.growth is None else str(method.growth)
        return {"growth": growth, "budget": method.budget, "engine": method.engine, "drafter": method.drafter}

    def _record(self, metric: str, method: Method, params: Record, **values: Any) -> Record:
        """Begin a record."""
        return {**self.base, "provider": method.name, "params": params, "metric": metric, **values}


def describe(verdict: Record) -> str:
    """Say in words why a method is not timed."""
    if verdict["status"] == "unavailable":
        return f"cannot run: {verdict['reason']}"
    if "p_value" in verdict:
        return f"fails: its text is not the target's (p = {verdict['p_value']:.1e})"
    if "logit_gap" in verdict:
        place, gap, scale = verdict["first_divergence"], verdict["logit_gap"], verdict["logit_scale"]
        return f"fails: its text differs at new token {place}, logit gap {gap:.2g} of a scale of {scale:.2g}"
    return "fails: its text is not plain decoding's"
