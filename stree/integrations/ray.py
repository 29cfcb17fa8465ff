"""Many prompts with Ray Data, and what ``stree batch`` runs; ``stree serve`` in replicas of Ray Serve."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from collections.abc import Generator as PythonGenerator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from stree.integrations.batch_rows import Row, request_of, without_nulls

if TYPE_CHECKING:
    from stree.integrations.batch_generate import RowGenerator

__all__ = ["Generator", "check_ray", "local_ray", "run_rows", "serve_app"]

RESULT = ("text", "token_ids", "finish_reason", "num_new_tokens", "reason")
FAILURE = "failure"


class Generator:
    """An actor for ``Dataset.map_batches`` that holds a model and generates a text for every row.

        dataset.map_batches(
            stree.integrations.ray.Generator,
            fn_constructor_kwargs={"target": "/models/granite", "sampling": stree.Sampling(0.7), "budget": "auto"},
            compute=ray.data.ActorPoolStrategy(size=4), num_gpus=1, batch_size=32,
        )

    A row has the columns that ``stree.integrations.batch_rows.request_of`` reads; of the others none is changed.
    Added, or replaced, are ``text``, ``token_ids``, ``finish_reason``, ``num_new_tokens`` and ``reason``, which says
    why a row cannot be run, where the others are null.

    Args:
        target: the folder or hub id of a model, or a function that loads a ``RowGenerator``.
        drafter: as for ``stree.generate``; "mtp", a folder or a hub id; None for "suffix".
        tokenizer: a folder or hub id, where the target has none of its own.
        load_options: those of ``TreeLM.from_pretrained``, such as ``dtype``.
        options: fields of ``RowGenerator`` (``sampling``, ``max_new_tokens``, ``max_batch``, ``chat``), and options of
            ``stree.generate`` that are one for all rows.
    """

    def __init__(
        self, target: str | Callable[[], RowGenerator], drafter: str | None = None, *, tokenizer: str | None = None,
        load_options: Mapping[str, Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        from stree.integrations.batch_generate import RowGenerator

        if callable(target):
            self.generator = target()
        else:
            words, load = _prepared(target, drafter, tokenizer, load_options or {})
            lm, drafting = load()
            names = ("sampling", "max_new_tokens", "max_batch", "chat")
            own = {name: options.pop(name) for name in names if name in options}
            self.generator = RowGenerator(lm, words, drafting, **own, options=options)
        self.generator.check()

    def __call__(self, batch: Any) -> Any:
        """Generate for the rows of an Arrow table, a dict of arrays or a pandas frame; return it with the columns."""
        if hasattr(batch, "itertuples"):
            batch = {name: batch[name].to_numpy() for name in batch}
        rows = _rows(batch)
        results, requests = [dict[str, Any]() for _ in rows], list[tuple[int, dict[str, Any]]]()
        for place, row in enumerate(rows):
            try:
                requests.append((place, request_of(row)))
            except (TypeError, ValueError) as error:
                results[place] = {"reason": str(error)}
        found = self.generator.run([request for _, request in requests])
        for (place, _), result in zip(requests, found, strict=True):
            results[place] = result
        return _with_columns(batch, {name: [result.get(name) for result in results] for name in RESULT})


def serve_app(
    target: str, drafter: str | None = None, *, name: str | None = None, tokenizer: str | None = None,
    load_options: Mapping[str, Any] | None = None, api_key_env: str | None = None, max_body: int = 8 << 20,
    deployment: Mapping[str, Any] | None = None, **options: Any,
) -> Any:  # fmt: skip
    """Return the server of ``stree serve`` as an application of Ray Serve, for ``serve.run``.

        serve.run(serve_app("ibm-granite/granite-4.0-h-tiny", max_batch=16, deployment={
            "autoscaling_config": {"min_replicas": 1, "max_replicas": 8}, "ray_actor_options": {"num_gpus": 1},
        }))

    Every replica loads the models and has an engine, a prefix cache and metrics (``ray_metrics``) of its own.

    Args:
        target: the folder or hub id of a model.
        drafter: as for ``stree.generate``; "mtp", a folder or a hub id; None for "suffix".
        name: the model's name in requests; ``target`` by default.
        tokenizer: a folder or hub id, where the target has none of its own.
        load_options: those of ``TreeLM.from_pretrained``, such as ``dtype``.
        api_key_env: the environment variable of the replicas that holds the API key, or None.
        max_body: most bytes of a request's body.
        deployment: options of ``ray.serve.deployment``.  ``max_ongoing_requests`` of a replica is twice ``max_batch``
            by default; further requests wait at the proxy.
        options: those of ``stree.Engine``.
    """
    from ray import serve

    def build() -> Any:
        """Make the application of a replica."""
        from stree.integrations.ray_metrics import exported
        from stree.serving import Engine, in_own_thread
        from stree.serving.app import create_app
        from stree.serving.first_requests import run_first_requests
        from stree.warming import ALL_BATCHES, compile_steps

        def start() -> Engine:
            lm, drafting = load()
            shape = {name: options[name] for name in ("growth", "budget", "verifier") if name in options}
            compile_steps(lm, drafting, batches=ALL_BATCHES, **shape)  # so that the first request need not wait
            engine = Engine(lm, drafting, **options)
            run_first_requests(engine)
            return engine

        api_key = None if api_key_env is None else os.environ[api_key_env]
        words, load = _prepared(target, drafter, tokenizer, load_options or {})
        engine = in_own_thread(start)
        replica = serve.get_replica_context().replica_tag
        app = create_app(engine, words, name or target, api_key=api_key, max_body=max_body, replica=replica)

        @asynccontextmanager
        async def lifespan(_: Any) -> AsyncIterator[None]:
            with engine:
                async with exported(app.state.metrics):
                    yield

        app.router.lifespan_context = lifespan
        return app

    settings = {"name": "stree", "max_ongoing_requests": 2 * options.get("max_batch", 8), **(deployment or {})}
    return serve.deployment(**settings)(serve.ingress(build)()).bind()


def _prepared(target: str, drafter: str | None, tokenizer: str | None, load_options: Mapping[str, Any]) -> Any:
    """Load a tokenizer, and return what loads the target and its drafter."""
    from stree.drafters import load
    from stree.inputs import load_tokenizer, locate
    from stree.models.tree_lm import TreeLM

    folder = locate(target, "target")
    words = load_tokenizer(tokenizer or folder, trust_remote_code=bool(load_options.get("trust_remote_code", False)))

    def models() -> Any:
        lm = TreeLM.from_pretrained(folder, **load_options)
        return lm, load(locate(drafter or "suffix", "drafter"), lm)

    return words, models


def run_rows(
    rows: Sequence[Row], load: Callable[[], RowGenerator], *, workers: int, gpus_per_worker: float, max_batch: int
) -> PythonGenerator[dict[str, Any], None, None]:
    """Generate the texts of rows by actors of Ray Data, in any order.

    Args:
        rows: with requests.
        load: loads what generates, in every worker.
        workers: actors.
        gpus_per_worker: of each, or a share of one; 0 for a core instead.
        max_batch: most sequences at once; a call takes up to four times as many rows, fewer where there are few.

    Yields:
        For each row one dict of ``row`` (its number), ``id``, and what ``RowGenerator.run`` returns.

    Raises:
        ValueError: more workers than the cluster has GPUs or cores for.
        RuntimeError: a worker failed.
    """
    import ray.data
    import ray.exceptions

    resource, each = ("GPU", gpus_per_worker) if gpus_per_worker else ("CPU", 1)
    found = ray.cluster_resources().get(resource, 0)
    if workers * each > found:
        raise ValueError(f"{workers} workers with {each:g} {resource} each need {workers * each:g}, got {found:g}")
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    size = max(1, min(4 * max_batch, math.ceil(len(rows) / (4 * workers))))
    items = [{"row": row.number, "body": json.dumps(row.request)} for row in rows]
    dataset = ray.data.from_items(items, override_num_blocks=math.ceil(len(items) / size)).map_batches(
        _Worker, fn_constructor_args=(load,), batch_size=None, batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=workers),
        **({"num_gpus": gpus_per_worker} if gpus_per_worker else {"num_cpus": 1}),
    )  # fmt: skip
    ids = {row.number: row.id for row in rows}
    hint = "finished rows are kept, run it again to go on"
    try:
        for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
            for result in table.select(["row", *RESULT, FAILURE]).to_pylist():
                if failure := result.pop(FAILURE):
                    raise RuntimeError(f"a worker failed: {failure}; {hint}")
                yield {"id": ids[result["row"]], **result}
    except ray.exceptions.RayError as error:
        raise RuntimeError(f"Ray failed: {_one_line(error)}; {hint}") from error


class _Worker:
    """The actor of a job: a ``Generator`` that tells of its failure in a column, as Ray prints stacks of many pages."""

    def __init__(self, load: Callable[[], RowGenerator]) -> None:
        self._failure: str | None = None
        try:
            self._generator = Generator(load)
        except Exception as error:
            self._failure = _one_line(error)

    def __call__(self, table: Any) -> Any:
        failure = self._failure
        if failure is None:
            try:
                return _with_columns(self._generator(table), {FAILURE: [None] * len(table)})
            except Exception as error:
                failure = _one_line(error)
        empty: dict[str, list[Any]] = {name: [None] * len(table) for name in RESULT}
        return _with_columns(table, {**empty, FAILURE: [failure] * len(table)})


def _one_line(error: Exception) -> str:
    """Name an error by its kind and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def check_ray() -> None:
    """Import Ray.

    Raises:
        RuntimeError: it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray.data  # noqa: F401
    except ImportError as error:
        raise RuntimeError(f"stree batch needs Ray: pip install 'stree[ray]' ({error})") from error


@contextmanager
def local_ray(workers: int) -> Iterator[None]:
    """Connect to the cluster that ``RAY_ADDRESS`` or ``ray start`` names, else start Ray on this machine for the block.

    Neither dashboard nor usage statistics are started.

    Raises:
        RuntimeError: Ray is not installed.
    """
    check_ray()
    import ray

    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "configure_logging": True}
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError:  # no cluster; cores beyond the workers' own are for Ray Data itself
        ray.init(address="local", num_cpus=max(os.cpu_count() or 1, workers + 1), include_dashboard=False, **quiet)
    try:
        yield
    finally:
        ray.shutdown()


def _rows(batch: Any) -> list[dict[str, Any]]:
    """List the rows of an Arrow table or of a dict of arrays."""
    if not isinstance(batch, dict):
        return [*map(without_nulls, batch.to_pylist())]
    columns = [[_plain(value) for value in column] for column in batch.values()]
    return [without_nulls(dict(zip(batch, values, strict=True))) for values in zip(*columns, strict=True)]


def _plain(value: Any) -> Any:
    """Return Python's own object for a value of numpy, also within others; None for NaN, numpy's null."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return [*map(_plain, value)]
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def _with_columns(batch: Any, columns: Mapping[str, list[Any]]) -> Any:
    """Add columns to a batch, as a table, whose types do not depend on the values."""
    import pyarrow

    types = {"token_ids": pyarrow.list_(pyarrow.int64()), "num_new_tokens": pyarrow.int64()}
    arrays = {name: pyarrow.array(column, types.get(name, pyarrow.string())) for name, column in columns.items()}
    if isinstance(batch, dict):
        return batch | arrays
    kept = [place for place, name in enumerate(batch.column_names) if name not in arrays]
    for name, array in arrays.items():
        batch = batch.append_column(name, array)
    return batch.select([*kept, *range(batch.num_columns - len(arrays), batch.num_columns)])
