"""Servers of the bundled pair: in this process, and behind Ray Serve."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.captured import launched, near_drafter
from helpers.http_served import TEMPLATE, Served, listening

import stree
from stree.drafters import ModelDrafter
from stree.inputs import ASSETS, load_tokenizer


@pytest.fixture(scope="session", autouse=True)
def _one_tls_context() -> Iterator[None]:
    """Read the certificates of authorities once, which takes each new client of the tests 25 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


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
def ray_served(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve the same by two replicas of Ray Serve."""
    from ray import serve

    from stree.integrations.ray import serve_app

    target, tokenizer = ASSETS / "target", load_tokenizer(str(ASSETS / "target"))
    tokenizer.chat_template, folder = TEMPLATE, str(tmp_path_factory.mktemp("words"))
    tokenizer.save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"port": port})
    serve.run(serve_app(
        str(target), str(ASSETS / "drafter"), name="tiny", tokenizer=folder, api_key_env="STREE_TEST_KEY",
        deployment={"num_replicas": 2}, budget=12, max_batch=4, max_length=256,
    ))  # fmt: skip
    alone = SimpleNamespace(lm=stree.TreeLM.from_pretrained(target))
    yield Served(f"http://127.0.0.1:{port}", alone, None, tokenizer)
    serve.shutdown()


@pytest.fixture(params=["served", pytest.param("ray_served", marks=pytest.mark.slow)])
def anywhere(request: pytest.FixtureRequest) -> Served:
    """A server in this process, or behind Ray Serve."""
    found: Served = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def engine() -> Iterator[stree.Engine]:
    """Give an engine of two rows."""
    with stree.Engine(launched(), near_drafter(), budget=12, max_batch=2, max_length=96) as engine:
        yield engine
