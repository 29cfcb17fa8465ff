"""Servers of the bundled pair: in this process, and behind Ray Serve."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.http_served import KEY, TEMPLATE, Served, listening

import stree
from stree.drafters import ModelDrafter
from stree.inputs import ASSETS, load_tokenizer


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Serve the bundled pair on a free port."""
    target, drafter = (stree.TreeLM.from_pretrained(ASSETS / name) for name in ("target", "drafter"))
    tokenizer = load_tokenizer(str(ASSETS / "target"))
    tokenizer.chat_template = TEMPLATE
    drafting = ModelDrafter(drafter)
    options: Any = {"budget": 12, "max_batch": 4, "max_length": 256, "max_queue": 8, "cache_bytes": 10**8}
    with stree.Engine(target, drafting, **options) as engine, listening(engine, tokenizer) as server:
        yield server


@pytest.fixture(scope="session")
def ray_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve the same by two replicas of Ray Serve."""
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'stree[ray]'")
    from ray import serve

    from stree.integrations.ray import serve_app

    target, tokenizer = ASSETS / "target", load_tokenizer(str(ASSETS / "target"))
    tokenizer.chat_template, folder = TEMPLATE, str(tmp_path_factory.mktemp("words"))
    tokenizer.save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"env_vars": {"STREE_TEST_KEY": KEY, "OMP_NUM_THREADS": "1"}}
    often = {"metrics_report_interval_ms": 1000}
    ray.init(address="local", num_cpus=4, include_dashboard=False, runtime_env=environment, _system_config=often)
    serve.start(http_options={"port": port})
    serve.run(serve_app(
        str(target), str(ASSETS / "drafter"), name="tiny", tokenizer=folder, api_key_env="STREE_TEST_KEY",
        deployment={"num_replicas": 2}, budget=12, max_batch=4, max_length=256,
    ))  # fmt: skip
    alone = SimpleNamespace(lm=stree.TreeLM.from_pretrained(target))
    yield Served(f"http://127.0.0.1:{port}", alone, None, tokenizer)
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(params=["served", pytest.param("ray_served", marks=pytest.mark.slow)])
def anywhere(request: pytest.FixtureRequest) -> Served:
    """A server in this process, or behind Ray Serve."""
    found: Served = request.getfixturevalue(request.param)
    return found
