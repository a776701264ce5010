"""The example of an HTTP endpoint: its answers are eager's, errors are reported, nothing is compiled after the
warm-up."""

import importlib.util
import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra: pip install forge-jit[test]")


def _example() -> ModuleType:
    path = Path(__file__).parents[1] / "examples/serve.py"
    spec = importlib.util.spec_from_file_location("serve_example", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["serve_example"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


serve = _example()


class Running:
    """A server in a thread."""

    def __init__(self, engine: Any, **options: Any) -> None:
        self.server = serve.Server(serve.Batcher(engine, **options), serve.Bytes())
        self.port = self.server.server_port
        self._thread = threading.Thread(target=self.server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self.server.close()
        self._thread.join()

    def error(self, content: bytes, path: str = "/generate") -> tuple[int, str]:
        """Return the status and the message of a request that fails."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", content)
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(request)
        return raised.value.code, json.load(raised.value)["error"]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    before = torch.compiler.config.recompile_limit
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORGE_BACKGROUND", "0")
        engine = serve.Engine(serve.load(None)[0], lengths=(8, 16), batches=(1, 2), max_new_tokens=4)
        engine.warm_up()
        started = Running(engine, window=0.05)
        yield started
        started.close()
    torch.compiler.config.recompile_limit = before


def test_clients_at_once_get_the_tokens_of_eager_by_the_programs_of_the_warm_up(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.load_test(running.server, clients=4, requests=16)
    printed = capsys.readouterr().out
    assert "programs: 6 after warm-up, 6 after the test" in printed
    assert "answers that are eager's, of each prompt alone: 16 of 16" in printed


def test_an_answer_has_as_many_tokens_as_its_request_wants(running: Running) -> None:
    with ThreadPoolExecutor(2) as pool:
        few, many = pool.map(lambda n: serve.ask(running.port, text="ab", max_new_tokens=n), (1, 4))
    assert few["tokens"] == many["tokens"][:1]
    assert len(many["tokens"]) == 4
    assert many["text"] == bytes(many["tokens"]).decode(errors="replace")


def test_an_answer_ends_where_the_text_does(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *_ = serve.ask(running.port, tokens=[7, 8, 9])["tokens"]
    assert first != second
    monkeypatch.setattr(running.server.batcher.engine, "_ends", {second})
    assert serve.ask(running.port, tokens=[7, 8, 9])["tokens"] == [first, second]


def test_the_health_names_the_programs(running: Running) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{running.port}/health") as response:
        assert json.load(response) == {"status": "ok", "programs": 6}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "Expecting property name"),
        (b"[]", 'must be an object with either "tokens" or "text"'),
        (b'{"tokens": [1], "text": "a"}', 'must be an object with either "tokens" or "text"'),
        (b'{"tokens": "1"}', "must be a list of integers from 0 to 255"),
        (b'{"tokens": [1, 256]}', "must be a list of integers from 0 to 255"),
        (b'{"tokens": [true]}', "must be a list of integers from 0 to 255"),
        (b'{"tokens": []}', "the prompt has 0 tokens, but must have 1 to 15"),
        (b'{"text": "a text of 16 byt"}', "the prompt has 16 tokens, but must have 1 to 15"),
        (b'{"tokens": [1], "max_new_tokens": 5}', "max_new_tokens is 5, but must be 1 to 4"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(running: Running, content: bytes, message: str) -> None:
    status, error = running.error(content)
    assert status == 400
    assert message in error


def test_another_path_is_not_found(running: Running) -> None:
    assert running.error(b"{}", "/v1/generate")[0] == 404


class Blocked:
    """An engine that generates only after a signal."""

    model = SimpleNamespace(config=SimpleNamespace(vocab_size=256))
    batches, longest_prompt, max_new_tokens = (1,), 15, 4

    def __init__(self) -> None:
        self.begins, self.may_go_on = threading.Event(), threading.Event()

    def generate(self, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        """Return the prompts."""
        self.begins.set()
        assert self.may_go_on.wait(30)
        if prompts == [[0]]:
            raise RuntimeError("out of memory")
        return prompts


def _submit(running: Running, tokens: list[int]) -> "Future[list[int]]":
    return running.server.batcher.submit(tokens, 4)


def test_a_full_queue_refuses_and_a_shutdown_answers_what_was_accepted() -> None:
    engine = Blocked()
    running = Running(engine, waiting=1)
    with ThreadPoolExecutor(2) as pool:
        answered = pool.submit(serve.ask, running.port, tokens=[1])
        assert engine.begins.wait(30)
        waiting = _submit(running, [2])
        assert running.error(b'{"tokens": [3]}') == (503, "1 requests are waiting; try again later")
        closed = pool.submit(running.close)
        running.server.batcher.closes.wait(30)
        with pytest.raises(serve.Overloaded, match="shutting down"):
            _submit(running, [4])
        engine.may_go_on.set()
        assert answered.result(30)["tokens"] == [1]
        assert waiting.result(30) == [2]
        closed.result(30)
    with pytest.raises(urllib.error.URLError):
        serve.ask(running.port, tokens=[5])


def test_an_error_of_one_batch_is_that_of_its_requests() -> None:
    engine = Blocked()
    engine.may_go_on.set()
    running = Running(engine)
    try:
        assert running.error(b'{"tokens": [0]}') == (500, "RuntimeError: out of memory")
        assert serve.ask(running.port, tokens=[1])["tokens"] == [1]
    finally:
        running.close()
