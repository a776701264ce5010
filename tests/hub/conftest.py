"""Fixtures of the hub's tests: a loopback Hub, and a separate cache for every test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forge.executors.hubex.verification import verification_cache
from forge.executors.hubex.verification.messages import Answer, Question
from forge.hub import client
from forge.testing.hub_server import Hub
from tests.hub.kernels import forget
from tests.hub.repositories import Repository


@pytest.fixture(autouse=True)
def _needs_extra() -> None:
    pytest.importorskip("kernels", reason="needs the extra: pip install forge-jit[hub]")


@pytest.fixture(autouse=True)
def _nothing_loaded() -> Iterator[None]:
    """Start each test without loaded kernels, in this process and in the verifying one."""
    yield
    forget()
    if verification_cache.worker.server is not None:
        verification_cache.worker.server.renew()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache, in a process that does not remember the Hub."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KERNELS_CACHE", str(folder))
    client.forget()
    return folder


@pytest.fixture
def server(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Yield a Hub for the real client; `acme` is a trusted publisher."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    server = Hub(trusted={"acme"}).start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    for name, value in {
        "ENDPOINT": server.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "AGENT_HARNESSES_PATH": str(tmp_path / "agents.json"),
    }.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    huggingface_hub.utils.disable_progress_bars()
    yield server
    server.stop()
    client.forget()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set HF_HUB_OFFLINE=1 as if the process had read it."""
    monkeypatch.setattr(pytest.importorskip("huggingface_hub").constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the verdicts of tests in their own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(verification_cache.verifier, "_answers", {})
    monkeypatch.setattr(verification_cache.verifier, "_failed", {})


@pytest.fixture(autouse=True, scope="session")
def _worker() -> Iterator[None]:
    yield
    verification_cache.worker.stop()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    """Record the questions that the worker gets."""
    questions: list[Question] = []
    ask = verification_cache.worker.ask

    def counted(kernel: Any, question: Question, *rest: Any) -> Answer | None:
        questions.append(question)
        return ask(kernel, question, *rest)

    monkeypatch.setattr(verification_cache.worker, "ask", counted)
    return questions


@pytest.fixture
def repository(tmp_path: Path) -> Callable[..., Repository]:
    def make(name: str, code: str, **entry: str) -> Repository:
        return Repository(tmp_path, name, code, **entry)

    return make
