"""The runs of ``stree bench run``: tune, check, measure, write.

All methods run a batch of prompts before the next begins, in an order that turns with every batch and repetition, so
that a machine's drift affects all of them equally.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

from stree.bench.directory import RunDirectory, finished_keys, key_of
from stree.bench.execute import Case, Run, execute, figures
from stree.bench.lossless import check_method, judge, reason_of
from stree.bench.methods import Method, parse_methods
from stree.bench.pair import Pair
from stree.bench.plan import Block, Key, Settings, Suite, plan_blocks
from stree.bench.rates import Rates
from stree.bench.records import Record, quantiles
from stree.bench.verdict import verdict_text
from stree.decode.step_cache import rounded, step_cache_of
from stree.heads import MaskedDiffusion, OneShotHead
from stree.models.heads.specblock import SpecBlockHead
from stree.verify import ForcedLength

__all__ = ["Runner"]

ENV = ("device", "threads", "torch", "triton", "transformers", "commit", "dirty", "date")  # in every record
NUM_CHECKED = 1  # prompts of each suite whose output is compared before timing

(PLAIN,) = parse_methods("plain")


class Runner:
    """One run of ``stree bench``.

    Args:
        pair: the models.
        methods: to compare.
        suites: prompts.
        settings: how they are run.
        directory: where records go.
        env: environment of this start; some of it is in every record.
        rates: of Sequoia's trees, or None for the default ones.

    Attributes:
        say: called with every line that is reported.
        advance: called with the number of runs of a method that are done.
    """

    def __init__(
        self,
        pair: Pair,
        methods: Sequence[Method],
        suites: Sequence[Suite],
        settings: Settings,
        directory: RunDirectory,
        env: Record,
        rates: Rates | None = None,
    ) -> None:
        self.pair, self.methods, self.suites, self.settings = pair, list(methods), list(suites), settings
        self.directory, self.rates = directory, rates
        self.base = {"bench": "run", "dtype": pair.dtype, "env": {name: env[name] for name in ENV if name in env}}
        self.say: Callable[[str], None] = print
        self.advance: Callable[..., None] = lambda *_: None
        self.blocks = plan_blocks(suites, settings)
        self._shapes: set[tuple[int, int]] = set()  # of the texts so far: sequences and rounded length
        directory.keep(finished_keys(self.blocks, self.methods, directory.records))

    @property
    def num_runs(self) -> int:
        """Number of planned runs of a method on a batch, checks not counted."""
        return len(self.blocks) * self._runs_a_block

    @property
    def _runs_a_block(self) -> int:
        return len(self.methods) * self.settings.repeats

    def run(self) -> None:
        """Run every block that is not finished."""
        finished = finished_keys(self.blocks, self.methods, self.directory.records)
        self.advance(len(finished) * self._runs_a_block)
        for suite in self.suites:
            for temperature in self.settings.temperatures:
                todo = [
                    (number, block)
                    for number, block in enumerate(self.blocks)
                    if (block.key.suite, block.key.temperature) == (suite.name, temperature)
                    and block.key not in finished
                ]
                if todo:
                    methods = [self._tuned(method, suite, temperature) for method in self.methods]
                    runnable = self._checked(methods, suite, temperature)
                    for number, block in todo:
                        runnable = self._measure(block, number, runnable)

    def _tuned(self, method: Method, suite: Suite, temperature: float) -> Method:
        """Choose a chain's depth on held-out prompts, once for a suite and temperature; give Sequoia its rates."""
        if not method.depths:
            return method if self.rates is None else self.rates.of(method, temperature)
        params = {"suite": suite.name, "temperature": temperature}
        for record in self.directory.find("tuning", **params):
            if record["provider"] == method.name:
                return method.with_depth(record["depth"])
        seconds = dict.fromkeys(method.depths, 0.0)
        prompts = [self._encode(prompt.turns[:1]) for prompt in suite.held_out]
        held_out = [prompt for prompt in prompts if self._fits([prompt])]
        try:
            for number, prompt in enumerate((held_out[0], *held_out)):  # the first warms up
                case = self._case([prompt], temperature)
                for depth in method.depths:
                    run = execute(self.pair, method.with_depth(depth), case)
                    seconds[depth] += run.seconds if number else 0.0
        except Exception:  # the check reports what is wrong
            return method.with_depth(method.depths[0])
        depth = min(seconds, key=lambda depth: seconds[depth])
        tokens = self.settings.max_new_tokens * len(held_out)
        speeds = {str(depth): tokens / total for depth, total in seconds.items()}
        values = {"depth": depth, "is_held_out": suite.is_held_out, "tokens_per_s_by_depth": speeds}
        self.directory.add([self._record("tuning", method, params, **values)])
        where = "held-out prompts" if suite.is_held_out else "the measured prompts: the file has no others"
        self.say(f"{suite.name}, T {temperature:g}: {method.name} is tuned to depth {depth} on {where}")
        return method.with_depth(depth)

    def _checked(self, methods: Sequence[Method], suite: Suite, temperature: float) -> list[Method]:
        """Compare outputs before timing, which also warms up; leave out methods that fail or cannot run."""
        runnable = []
        params = {"suite": suite.name, "temperature": temperature}
        known = {record["provider"]: record for record in self.directory.find("check", **params)}
        prompts = (self._encode(prompt.turns[:1]) for prompt in suite.prompts)
        fitting = (self._case([prompt], temperature) for prompt in prompts if self._fits([prompt]))
        cases = [*islice(fitting, NUM_CHECKED)]
        for method in methods:
            if method.name in known and known[method.name]["status"] != "ok":
                continue
            verdict = check_method(self.pair, method, cases, self.settings.test_texts, self.advance)
            self.advance(0)
            if method.name not in known:
                self.directory.add([self._record("check", method, params, **verdict)])
            if verdict["status"] == "ok":
                runnable.append(method)
            else:
                where = f"{suite.name}, T {temperature:g}"
                self.say(f"{where}: {method.name} {verdict_text(verdict)}; it is not timed")
        return runnable

    def _measure(self, block: Block, number: int, methods: list[Method]) -> list[Method]:
        """Run all methods on one block, and write their records; return the methods that can go on."""
        earlier = block.key._replace(turn=block.key.turn - 1)
        is_skipped = earlier in map(key_of, self.directory.find("skipped"))  # a later turn is longer
        if is_skipped or not self._fits(prompts := self._contexts(block)):
            reason = f"a prompt and {self.settings.max_new_tokens} new tokens exceed {self.pair.target.max_length}"
            self.directory.add([self._record("skipped", PLAIN, block.params, reason=reason)])
            self.say(f"{block.key.suite}: prompts {block.params['prompts']} are left out: {reason}")
            self.advance(self._runs_a_block)
            return methods
        self._keep_graphs(prompts)
        case = self._case(prompts, block.key.temperature, block.key.seed)
        done = 0
        runs: dict[str, list[Run]] = {method.name: [] for method in methods}
        failed: list[Record] = []
        for repeat in range(self.settings.repeats):
            start = (number + repeat) % max(len(runs), 1)
            going = [method for method in methods if method.name in runs]
            for method in going[start:] + going[:start]:
                try:
                    runs[method.name].append(execute(self.pair, method, case))
                except Exception as error:  # the other methods are still run
                    params = {"suite": block.key.suite, "temperature": block.key.temperature}
                    verdict = {"status": "unavailable", "reason": reason_of(error)}
                    failed.append(self._record("check", method, params, **verdict))
                    self.say(f"{block.key.suite}: {method.name} {verdict_text(verdict)}; it is not timed any more")
                    del runs[method.name]
                self.advance(1)
                done += 1
        self.advance(self._runs_a_block - done)
        going = [method for method in methods if method.name in runs]
        self.directory.add([*failed, *(self._timed(block, method, runs, case) for method in going)])
        return going

    def _keep_graphs(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raise the number of captured steps that are kept, since methods take turns."""
        step_cache = step_cache_of(self.pair.target)
        if step_cache is not None:
            self._shapes.add((len(prompts), rounded(max(map(len, prompts)) + self.settings.max_new_tokens)))
            step_cache.most = max(step_cache.most, len(self.methods) * len(self._shapes))

    def _timed(self, block: Block, method: Method, repeats: dict[str, list[Run]], case: Case) -> Record:
        """Make the record of one method's runs of a block: quantiles of their speed, and what the median one did."""
        runs = {name: sorted(of, key=lambda run: run.seconds)[len(of) // 2] for name, of in repeats.items()}
        run = runs[method.name]
        growth = None if method.growth is None else str(method.growth)
        own: Record = {
            "growth": growth, "budget": method.budget, "baseline": method.baseline, "drafter": method.drafter,
        }  # fmt: skip
        if isinstance(self.pair.head, MaskedDiffusion | OneShotHead | SpecBlockHead):
            own["drafts_blocks"] = True
        record = self._record("tokens_per_s", method, {**block.params, **own}, unit="tokens/s")
        tokens = len(case.prompts) * case.new_tokens
        record |= quantiles([tokens / run.seconds for run in repeats[method.name]])
        record |= figures(run) | judge(self.pair, method, case, run, runs)
        if self.settings.return_steps:
            steps = execute(self.pair, method, replace(case, return_steps=True)).steps
            record["step_records"] = steps and [[asdict(step) for step in text] for text in steps]
        return record

    def _contexts(self, block: Block) -> list[list[int]]:
        """Make the prompts of a block; a later turn has plain decoding's answers to the earlier ones in context."""
        answers: dict[int, list[list[int]]] = {prompt.index: [] for prompt in block.prompts}
        for earlier in range(block.key.turn):
            for index, answer in self._answers(block.key._replace(turn=earlier)).items():
                if index in answers:
                    answers[index].append(answer)
        return [self._encode(prompt.turns[: block.key.turn + 1], answers[prompt.index]) for prompt in block.prompts]

    def _answers(self, key: Key) -> dict[int, list[int]]:
        """Look plain decoding's answers in a block up in the records, or make them."""
        for record in self.directory.find("tokens_per_s"):
            if record["provider"] == "plain" and key_of(record) == key:
                return dict(zip(record["params"]["prompts"], record["tokens"][0], strict=True))
        block = next(block for block in self.blocks if block.key == key)
        run = execute(self.pair, PLAIN, self._case(self._contexts(block), key.temperature, key.seed))
        return dict(zip(block.params["prompts"], run.tokens, strict=True))

    def _encode(self, turns: Sequence[str], answers: Sequence[Sequence[int]] = ()) -> list[int]:
        """Tokenize a conversation."""
        return self.pair.encode(turns, answers, chat=self.settings.chat)

    def _fits(self, prompts: Sequence[Sequence[int]]) -> bool:
        """Whether the target has enough positions."""
        most = self.pair.target.max_length
        return most is None or max(map(len, prompts)) + self.settings.max_new_tokens <= most

    def _case(self, prompts: Sequence[Sequence[int]], temperature: float, seed: int | None = None) -> Case:
        """Make the input of a method, by default with the first seed."""
        rows, own = tuple(tuple(prompt) for prompt in prompts), self.settings
        return Case(
            rows, own.max_new_tokens, temperature, own.seeds[0] if seed is None else seed, top_k=own.top_k,
            top_p=own.top_p,
        )  # fmt: skip

    def _record(self, metric: str, method: Method, params: Record, **values: Any) -> Record:
        """Begin a record."""
        if isinstance(method.verifier, ForcedLength):
            values |= {"is_lossy": True, "forced_acceptance_length": method.verifier.tokens}
        return {**self.base, "provider": method.name, "params": params, "metric": metric, **values}
