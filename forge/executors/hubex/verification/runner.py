"""A kernel's functions in a process of their own, called from the one that judges them.

The judge has no code of the kernel and holds the channel to the program; the runner imports the kernel and holds a
channel to the judge alone. A call takes the bytes of all memory that its tensors lie in there, and brings back what the
kernel changed of them and returned: descriptions in JSON and bytes, nothing that runs when it is read.
"""

import ctypes
import json
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from forge.executors.hubex.kernels import Kernel
from forge.executors.hubex.verification.messages import HEADER, Ended, Request, read, receive, send
from forge.executors.hubex.verification.process import verifying

_PR_SET_PDEATHSIG = 1
REMEMBERED = 4  # calls whose results are kept, to see whether one is returned again
_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


class Died(BaseException):
    """The runner ended; nothing between the call and the judge's loop is to take it for an error of the kernel's."""


class Runner:
    """The judge's end."""

    def __init__(self, find: Callable[[Request], tuple[Kernel | None, str | None]], keep_out: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        judge = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            for each in keep_out:
                os.close(each)
            _run(theirs.fileno(), find, judge)
        theirs.close()
        self._channel = ours

    def find(self, request: Request) -> str | None:
        """Has the kernel imported: None, "differs" where another one is there, or why there is none."""
        return self._ask(("find", request))[0]["found"]

    def call(self, what: str, args: Any, kwargs: Any) -> Any:
        """What a function of the kernel gives; what it wrote is in the arguments."""
        memory = _Memory()
        tree = memory.described([list(args), kwargs])
        differentiates = torch.is_grad_enabled() and any(each.requires_grad for each in memory.tensors)
        reply, blocks = self._ask(("call", what, tree, memory.blocks(), differentiates))
        result = memory.read(reply, blocks)
        if reply["graph"] is None:
            return result
        found = _leaves(result)
        flat = _Remote.apply(self, reply["graph"], memory, reply["differentiable"], found, *memory.tensors)
        by_id = dict(zip(map(id, found), flat if isinstance(flat, tuple) else (flat,), strict=True))
        return _mapped(result, lambda tensor: by_id[id(tensor)])

    def differentiate(self, graph: int, forward: "_Memory", gradients: Sequence[torch.Tensor]) -> list[Any]:
        """The gradients of the tensors that a call was given."""
        memory = _Memory(forward)
        tree = memory.described(list(gradients))
        reply, blocks = self._ask(("backward", graph, tree, memory.blocks(len(forward.storages))))
        return memory.read(reply, blocks)

    def _ask(self, message: Any) -> tuple[Any, list[bytes]]:
        fd = self._channel.fileno()
        try:
            send(fd, message)
            reply, blocks = _received(fd)
        except (Ended, OSError):
            raise Died from None
        if "raised" in reply:
            name, text, memory = reply["raised"]
            raise (MemoryError(text) if memory else type(str(name), (RuntimeError,), {})(text))
        return reply, blocks

    def die_alike(self) -> None:
        """Ends this process as the runner ended."""
        self._channel.close()
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if code >= 0:
            os._exit(code)
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        os._exit(1)

    def stop(self) -> None:
        self._channel.close()


class Called:
    """A function of a kernel, as the judge has it."""

    def __init__(self, runner: Runner, what: str) -> None:
        self.runner, self.what = runner, what
        self.__name__ = what

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.runner.call(self.what, args, kwargs)


class _Remote(torch.autograd.Function):
    """A call whose graph the runner holds."""

    @staticmethod
    def forward(
        ctx: Any,
        runner: Runner,
        graph: int,
        memory: "_Memory",
        differentiable: list[bool],
        results: list[torch.Tensor],
        *inputs: torch.Tensor,
    ) -> tuple:
        ctx.runner, ctx.graph, ctx.memory, ctx.differentiable = runner, graph, memory, differentiable
        fixed = [each for each, moves in zip(results, differentiable, strict=True) if not moves]
        ctx.mark_non_differentiable(*fixed)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple:
        given = [each for each, moves in zip(gradients, ctx.differentiable, strict=True) if moves]
        found = ctx.runner.differentiate(ctx.graph, ctx.memory, given)
        return (None, None, None, None, None, *found)


class _Memory:
    """The memory that tensors of a call lie in: each storage once, and its bytes as they were."""

    def __init__(self, before: "_Memory | None" = None) -> None:
        self.storages: list[torch.UntypedStorage] = list(before.storages) if before else []
        self.tensors: list[torch.Tensor] = []

    def described(self, tree: Any) -> Any:
        """A tree in which tensors are places in memory."""
        return _encoded(tree, self._place)

    def _place(self, tensor: torch.Tensor) -> dict[str, Any]:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise TypeError(f"a {tensor.layout} tensor cannot be handed to another process")
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        storage = tensor.untyped_storage()
        known = next((i for i, each in enumerate(self.storages) if each._cdata == storage._cdata), None)
        if known is None:
            known = len(self.storages)
            self.storages.append(storage)
        self.tensors.append(tensor)
        place = [str(tensor.dtype), list(tensor.shape), list(tensor.stride()), tensor.storage_offset()]
        return {"in": known, "as": place, "grad": tensor.requires_grad}

    def blocks(self, start: int = 0) -> list[tuple[str, bytes]]:
        return [(str(each.device), _bytes(each)) for each in self.storages[start:]]

    def add(self, blocks: Sequence[tuple[str, bytes]]) -> None:
        """Memory of this process with these bytes."""
        self.storages += [_storage(device, content) for device, content in blocks]

    def tensor(self, place: Mapping[str, Any]) -> torch.Tensor:
        """A tensor in that memory. Raises RuntimeError for one that is not within it."""
        dtype, shape, stride, offset = place["as"]
        whole = torch.empty(0, dtype=_DTYPES[dtype], device=self.storages[place["in"]].device)
        return whole.set_(self.storages[place["in"]]).as_strided(shape, stride, offset)

    def read(self, reply: Mapping[str, Any], blocks: Sequence[bytes]) -> Any:
        """What the runner says that it wrote and returned."""
        count = len(reply["changed"])
        for index, content in zip(reply["changed"], blocks, strict=False):
            _write(self.storages[index], content)
        held = _Memory(self)
        held.add(list(zip(reply["devices"], blocks[count:], strict=True)))
        return _decoded(reply["result"], held.tensor)


def _bytes(storage: torch.UntypedStorage) -> bytes:
    held = storage.cpu()
    return ctypes.string_at(held.data_ptr(), held.nbytes()) if held.nbytes() else b""


def _storage(device: str, content: bytes) -> torch.UntypedStorage:
    made = torch.empty(len(content), dtype=torch.uint8, device=device).untyped_storage()
    _write(made, content)
    return made


def _write(storage: torch.UntypedStorage, content: bytes) -> None:
    if len(content) != storage.nbytes():
        raise RuntimeError(f"{len(content)} bytes were handed over for memory of {storage.nbytes()}")
    if not content:
        return
    if storage.device.type == "cpu":
        ctypes.memmove(storage.data_ptr(), content, len(content))
    else:
        storage.copy_(_storage("cpu", content))


def _encoded(value: Any, place: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return {"t": place(value)}
    if isinstance(value, (tuple, list)):
        return {"(" if isinstance(value, tuple) else "[": [_encoded(each, place) for each in value]}
    if isinstance(value, dict):
        return {"{": [[str(key), _encoded(each, place)] for key, each in value.items()]}
    return {"=": value}


def _decoded(tree: Mapping[str, Any], tensor: Callable[[Mapping[str, Any]], torch.Tensor]) -> Any:
    [(kind, held)] = tree.items()
    if kind == "t":
        return tensor(held)
    if kind in "([":
        items = [_decoded(each, tensor) for each in held]
        return tuple(items) if kind == "(" else items
    if kind == "{":
        return {key: _decoded(each, tensor) for key, each in held}
    return held


def _leaves(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _mapped(tree, found.append)
    return found


def _mapped(tree: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(_mapped(each, function) for each in tree)
    return {key: _mapped(each, function) for key, each in tree.items()} if isinstance(tree, dict) else tree


# messages of the runner: JSON, and blocks of bytes


def _received(fd: int) -> tuple[Any, list[bytes]]:
    (length,) = HEADER.unpack(read(fd, HEADER.size))
    reply = json.loads(read(fd, length))
    return reply, [read(fd, size) for size in reply["sizes"]]


def _reply(fd: int, message: dict[str, Any], blocks: Sequence[bytes] = ()) -> None:
    data = json.dumps({**message, "sizes": [len(each) for each in blocks]}).encode()
    for part in (HEADER.pack(len(data)), data, *blocks):
        left = memoryview(part)
        while left:
            left = left[os.write(fd, left) :]


# the runner's end


def _run(fd: int, find: Callable[[Request], tuple[Kernel | None, str | None]], judge: int) -> None:
    status = 0
    try:
        _end_with(judge)
        os.setsid()  # what the kernel sends to its process group reaches itself alone
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        verifying.active = True
        _Serving(fd, find).forever()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        status = 1
    finally:
        os._exit(status)


def _end_with(judge: int) -> None:
    """This process ends when the judge does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != judge:
        os._exit(0)


class _Serving:
    """Answers the judge with one kernel's functions."""

    def __init__(self, fd: int, find: Callable[[Request], tuple[Kernel | None, str | None]]) -> None:
        self.fd, self._find = fd, find
        self.kernel: Kernel | None = None
        self.graphs: list[tuple[_Memory, list[bytes], list[torch.Tensor], list[torch.Tensor]]] = []
        self.returned: deque[list[torch.UntypedStorage]] = deque(maxlen=REMEMBERED)

    def forever(self) -> None:
        while True:
            try:
                kind, *message = receive(self.fd)
            except Ended:
                return
            try:
                reply, blocks = {"find": self._take, "call": self._call, "backward": self._backward}[kind](*message)
            except Exception as error:
                text = str(error).strip().partition("\n")[0]
                wanting = isinstance(error, (MemoryError, torch.OutOfMemoryError))
                reply, blocks = {"raised": [type(error).__name__, text, wanting]}, []
            _reply(self.fd, reply, blocks)

    def _take(self, request: Request) -> tuple[dict[str, Any], list[bytes]]:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 100 * request.seconds + 600)
        self.graphs.clear()
        self.returned.clear()
        self.kernel, problem = self._find(request)
        torch.manual_seed(0)
        return {"found": problem}, []

    def _call(self, what: str, tree: Any, blocks: list, differentiates: bool) -> tuple[dict[str, Any], list[bytes]]:
        memory = _Memory()
        memory.add(blocks)
        before = [content for _, content in blocks]
        inputs: list[torch.Tensor] = []

        def tensor(place: Mapping[str, Any]) -> torch.Tensor:
            inputs.append(memory.tensor(place).requires_grad_(differentiates and place["grad"]))
            return inputs[-1]

        args, kwargs = _decoded(tree, tensor)
        with torch.set_grad_enabled(differentiates):
            result = getattr(self.kernel, what)(*args, **kwargs)
        graph = None
        outputs = _leaves(result)
        self._check_returned(outputs, memory, differentiates)
        if any(each.requires_grad for each in outputs) and differentiates:
            graph = len(self.graphs)
            moving = [each for each in outputs if each.requires_grad]
            self.graphs.append((memory, before, inputs, moving))
        found = {"graph": graph, "differentiable": [each.requires_grad for each in outputs]}
        return self._told(found, memory, before, result)

    def _check_returned(self, outputs: list[torch.Tensor], given: _Memory, differentiates: bool) -> None:
        """Raises for results that a program cannot take for its own: what reads or changes them would meet what the
        kernel does with them later."""
        for each in outputs:
            if type(each) is not torch.Tensor:
                raise TypeError(f"it returns a {type(each).__name__}, but must return a torch.Tensor")
            if each.requires_grad and not differentiates:
                raise RuntimeError("it returns a tensor that requires a gradient, where nothing that it is given does")
        theirs = {each._cdata for each in given.storages}
        fresh = [each.untyped_storage() for each in outputs]
        fresh = [each for each in fresh if each.nbytes() and each._cdata not in theirs]
        before = {each._cdata for storages in self.returned for each in storages}  # alive, so that none has its place
        if any(each._cdata in before for each in fresh):
            raise RuntimeError("it returns memory that it has returned before: the earlier result is overwritten")
        self.returned.append(fresh)

    def _backward(self, graph: int, tree: Any, blocks: list) -> tuple[dict[str, Any], list[bytes]]:
        forward, before, inputs, outputs = self.graphs[graph]
        memory = _Memory(forward)
        memory.add(blocks)
        gradients = _decoded(tree, memory.tensor)
        wanted = [each for each in inputs if each.requires_grad]
        found = iter(torch.autograd.grad(outputs, wanted, gradients, retain_graph=True, allow_unused=True))
        result = [next(found) if each.requires_grad else None for each in inputs]
        return self._told({}, memory, [*before, *(content for _, content in blocks)], result)

    def _told(
        self, reply: dict[str, Any], memory: _Memory, before: list[bytes], result: Any
    ) -> tuple[dict[str, Any], list[bytes]]:
        """What a call changed of the memory that it was given, and returned; with the memory that is new."""
        count = len(memory.storages)
        held = _Memory(memory)
        described = _encoded(_mapped(result, torch.Tensor.detach), held._place)
        json.dumps(described)  # what cannot be handed over is the kernel's error
        now = [_bytes(each) for each in memory.storages]
        changed = [i for i in range(count) if now[i] != before[i]]
        before[:] = now
        fresh = held.blocks(count)
        told = {"changed": changed, "devices": [device for device, _ in fresh], "result": described}
        return {**reply, **told}, [*(now[i] for i in changed), *(content for _, content in fresh)]
