"""Serves a language model over HTTP: requests that arrive together are one batch, of a few shapes that are compiled
before the first one.

    python examples/serve.py [CHECKPOINT] [--port 8000] [--int8]
    python examples/serve.py [CHECKPOINT] --load-test

    curl localhost:8000/generate -d '{"tokens": [5, 6, 7], "max_new_tokens": 8}'
    curl localhost:8000/generate -d '{"text": "Once upon a time"}'
    curl localhost:8000/health

CHECKPOINT is a folder of transformers' save_pretrained; without one, a small Llama of random weights answers bytes.
Answers are greedy. A request that is wrong gets 400, and one that finds the queue full 503.
"""

import argparse
import json
import queue
import random
import signal
import statistics
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import forge
from forge.quantize import Int8WeightOnly

LONGEST_BODY = 1 << 20
PAD = 0  # no token sees it


class Engine:
    """A model whose programs are those of a few shapes: `batches` times `lengths` for prompts, `batches` for tokens.

    Prompts are padded on the left to the next of `lengths`, and the batch to the next of `batches` by copies of its
    first row. forge's loop of `generate` has one program a token for each size of a batch, for prompts of all lengths.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        lengths: Sequence[int] = (16, 32, 64),
        batches: Sequence[int] = (1, 2, 4),
        max_new_tokens: int = 32,
        transforms: Sequence[Any] = (),
        eager: bool = False,
    ) -> None:
        self.model = model.eval()
        self.lengths, self.batches, self.max_new_tokens = lengths, batches, max_new_tokens
        # One position is always padding: generate drops a mask without any, and that is another program.
        self.longest_prompt = lengths[-1] - 1
        wanted = len(batches) * (len(lengths) + 1)
        torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, wanted)
        self.eager = eager
        self.jitted = self.model if eager else forge.jit(self.model, dynamic=False, transforms=transforms)
        self.rounds_as_eager = self.model.dtype == torch.float32 and not transforms
        ends = self.model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])

    def warm_up(self) -> None:
        """Compile the programs of all shapes."""
        for batch in self.batches:
            for length in self.lengths:
                self.generate([[PAD] * (length - 1)] * batch, 2)
        if not self.eager:
            forge.finish_compiling(self.jitted)  # of larger regions, which would hold up requests

    def programs(self) -> int:
        """Return how many programs there are. Raises RuntimeError if calls run in eager."""
        if self.eager:
            return 0
        found = forge.explain(self.jitted)
        if found.eager:
            raise RuntimeError(f"not compiled: {found.eager[0]}")
        return found.graphs

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        """Return the tokens that follow each prompt, up to one that ends a text."""
        length = next(each for each in self.lengths if each > max(map(len, prompts)))
        batch = next(each for each in self.batches if each >= len(prompts))
        rows = prompts + prompts[:1] * (batch - len(prompts))
        ids = torch.tensor([[PAD] * (length - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
        out = self.jitted.generate(
            ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=PAD,
        )
        return [self._up_to_end(row) for row in out[: len(prompts), length:].tolist()]

    def _up_to_end(self, tokens: list[int]) -> list[int]:
        end = next((i for i, token in enumerate(tokens) if token in self._ends), len(tokens))
        return tokens[: end + 1]


class Request(NamedTuple):
    """A prompt, and the place for its answer."""

    tokens: list[int]
    max_new_tokens: int
    answer: Future


class Overloaded(Exception):
    """The queue is full, or the server ends."""


class Batcher:
    """A thread that runs requests which arrive within `window` seconds as one batch."""

    def __init__(self, engine: Engine, *, window: float = 0.005, waiting: int = 64) -> None:
        self.engine = engine
        self._window = window
        self._queue: queue.Queue[Request | None] = queue.Queue(waiting)
        self._lock = threading.Lock()
        self.closes = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batcher")
        self._thread.start()

    def submit(self, tokens: list[int], max_new_tokens: int) -> Future:
        """Return the future answer. Raises Overloaded."""
        request = Request(tokens, max_new_tokens, Future())
        with self._lock:
            if self.closes.is_set():
                raise Overloaded("the server is shutting down")
            try:
                self._queue.put_nowait(request)
            except queue.Full:
                raise Overloaded(f"{self._queue.maxsize} requests are waiting; try again later") from None
        return request.answer

    def close(self) -> None:
        """Answer what is in the queue, and end."""
        with self._lock:
            self.closes.set()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            requests = self._gather(first)
            try:
                longest = max(each.max_new_tokens for each in requests)
                answers = self.engine.generate([each.tokens for each in requests], longest)
            except Exception as error:  # which is that of these requests alone
                for each in requests:
                    each.answer.set_exception(error)
                continue
            for each, answer in zip(requests, answers, strict=True):
                each.answer.set_result(answer[: each.max_new_tokens])

    def _gather(self, first: Request) -> list[Request]:
        requests, until = [first], time.monotonic() + self._window
        while len(requests) < self.engine.batches[-1]:
            try:
                following = self._queue.get(timeout=max(0, until - time.monotonic()))
            except queue.Empty:
                break
            if following is None:
                self._queue.put(None)  # for _run
                break
            requests.append(following)
        return requests


class Bytes:
    """The tokenizer of a model without one: a token is a byte."""

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def decode(self, tokens: list[int], **_: Any) -> str:
        """Return the text of bytes."""
        return bytes(tokens).decode(errors="replace")


class Server(ThreadingHTTPServer):
    """The endpoint on the loopback. `port` 0 takes a free one."""

    request_queue_size = 128
    daemon_threads = False  # server_close waits for the answers that are on their way

    def __init__(self, batcher: Batcher, tokenizer: Any, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.batcher, self.tokenizer = batcher, tokenizer

    def close(self) -> None:
        """Take no more requests, and return when all are answered."""
        self.shutdown()
        self.batcher.close()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    timeout = 60  # seconds without a byte from the client

    def do_GET(self) -> None:
        """Answer /health."""
        if self.path != "/health":
            return self._answer(404, {"error": "there are POST /generate and GET /health"})
        return self._answer(200, {"status": "ok", "programs": self.server.batcher.engine.programs()})

    def do_POST(self) -> None:
        """Answer /generate."""
        if self.path != "/generate":
            return self._answer(404, {"error": "there are POST /generate and GET /health"})
        try:
            tokens, max_new_tokens = self._read()
        except ValueError as error:
            return self._answer(400, {"error": str(error)})
        try:
            found = self.server.batcher.submit(tokens, max_new_tokens).result()
        except Overloaded as error:
            return self._answer(503, {"error": str(error)})
        except Exception as error:
            return self._answer(500, {"error": f"{type(error).__name__}: {error}"})
        text = self.server.tokenizer.decode(found, skip_special_tokens=True)
        return self._answer(200, {"tokens": found, "text": text})

    def _read(self) -> tuple[list[int], int]:
        """Return (tokens, max_new_tokens) of the request. Raises ValueError."""
        size = self.headers.get("Content-Length") or ""
        if not size.isdigit() or int(size) > LONGEST_BODY:
            raise ValueError(f"Content-Length is {size or 'missing'}, but must be at most {LONGEST_BODY}")
        body = json.loads(self.rfile.read(int(size)))
        if not isinstance(body, dict) or ("tokens" in body) == ("text" in body):
            raise ValueError('the body must be an object with either "tokens" or "text"')
        engine = self.server.batcher.engine
        tokens = self.server.tokenizer.encode(str(body["text"])) if "text" in body else body["tokens"]
        vocabulary = engine.model.config.vocab_size
        if not isinstance(tokens, list) or not all(type(each) is int and 0 <= each < vocabulary for each in tokens):
            raise ValueError(f"tokens must be a list of integers from 0 to {vocabulary - 1}")
        if not 1 <= len(tokens) <= engine.longest_prompt:
            raise ValueError(f"the prompt has {len(tokens)} tokens, but must have 1 to {engine.longest_prompt}")
        wanted = body.get("max_new_tokens", engine.max_new_tokens)
        if type(wanted) is not int or not 1 <= wanted <= engine.max_new_tokens:
            raise ValueError(f"max_new_tokens is {wanted!r}, but must be 1 to {engine.max_new_tokens}")
        return tokens, wanted

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if status == 503:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Print no line for each request."""


def ask(port: int, **body: Any) -> Any:
    """Return the answer of /generate on the loopback."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def load_test(server: Server, clients: int, requests: int) -> bool:
    """Ask from several threads, print times, and return whether nothing was compiled and answers are eager's."""
    engine = server.batcher.engine
    before, source = engine.programs(), random.Random(0)
    vocabulary = engine.model.config.vocab_size
    sizes = [source.randint(1, engine.longest_prompt) for _ in range(requests)]
    prompts = [[source.randrange(vocabulary) for _ in range(size)] for size in sizes]

    def timed(tokens: list[int]) -> tuple[float, list[int]]:
        start = time.perf_counter()
        found = ask(server.server_port, tokens=tokens)["tokens"]
        return time.perf_counter() - start, found

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(timed, prompts))
    seconds = time.perf_counter() - start
    cuts = statistics.quantiles([latency for latency, _ in answers], n=20)
    longest = max(latency for latency, _ in answers)
    tokens = sum(len(found) for _, found in answers)
    rates = f"{requests / seconds:.1f} requests/s, {tokens / seconds:.0f} tokens/s"
    print(f"{requests} requests of {clients} clients: {rates}")
    print(f"latency: p50 {cuts[9] * 1e3:.0f} ms, p95 {cuts[18] * 1e3:.0f} ms, longest {longest * 1e3:.0f} ms")
    after = engine.programs()
    print(f"programs: {before} after warm-up, {after} after the test")
    if not engine.rounds_as_eager:
        return before == after
    same = sum(_eager(engine, prompt) == found for prompt, (_, found) in zip(prompts, answers, strict=True))
    print(f"answers that are eager's, of each prompt alone: {same} of {requests}")
    return before == after and same == requests


@torch.no_grad()
def _eager(engine: Engine, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt], device=engine.model.device)
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": engine.max_new_tokens, "do_sample": False, "pad_token_id": PAD}
    return engine.model.generate(ids, attention_mask=mask, **options)[0, len(prompt) :].tolist()


def load(checkpoint: str | None) -> tuple[torch.nn.Module, Any]:
    """Return the model and the tokenizer of a checkpoint, or a small model of random weights."""
    if checkpoint is not None:
        return AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**sizes, **tokens, num_key_value_heads=2, initializer_range=0.3)), Bytes()


def powers(first: int, last: int) -> list[int]:
    """Return the powers of two from `first` on, up to one that is not less than `last`."""
    found = [first]
    while found[-1] < last:
        found.append(2 * found[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--int8", action="store_true", help="quantize the weights of linear layers")
    parser.add_argument("--eager", action="store_true", help="do not jit, to compare")
    parser.add_argument("--max-prompt", type=int, default=63)
    parser.add_argument("--max-batch", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--load-test", action="store_true")
    parser.add_argument("--clients", type=int, default=8, help="of the load test")
    parser.add_argument("--requests", type=int, default=100, help="of the load test")
    options = parser.parse_args()

    model, tokenizer = load(options.checkpoint)
    engine = Engine(
        model.to("cuda" if torch.cuda.is_available() else "cpu"),
        lengths=powers(16, options.max_prompt + 1),
        batches=powers(1, options.max_batch),
        max_new_tokens=options.max_new_tokens,
        transforms=[Int8WeightOnly()] if options.int8 else [],
        eager=options.eager,
    )
    start = time.perf_counter()
    engine.warm_up()
    print(f"{engine.programs()} programs in {time.perf_counter() - start:.0f} s", flush=True)
    server = Server(Batcher(engine), tokenizer, 0 if options.load_test else options.port)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    passed = True
    try:
        if options.load_test:
            passed = load_test(server, options.clients, options.requests)
        else:
            print(f"http://127.0.0.1:{server.server_port}", flush=True)
            ends = threading.Event()
            signal.signal(signal.SIGTERM, lambda *_: ends.set())
            signal.signal(signal.SIGINT, lambda *_: ends.set())
            ends.wait()
    finally:
        server.close()
        thread.join()
    raise SystemExit(not passed)


if __name__ == "__main__":
    main()
