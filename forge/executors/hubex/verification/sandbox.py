"""A kernel's functions in a separate process, called from the judge, which compares their results.

The judge has no code of the kernel and holds the channel to the program; the sandbox imports the kernel and holds only
a channel to the judge. A call sends the bytes of all storages of its tensors, and receives the kernel's writes and
results: descriptions in JSON and bytes, a format that cannot run code when it is read.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from forge.executors.hubex.assumptions import taken_values
from forge.executors.hubex.kernels import Kernel
from forge.executors.hubex.verification.messages import Request
from forge.executors.hubex.verification.process import verifying
from forge.executors.hubex.verification.watched import changed_states, draw, random_states, watched
from forge.torch_internals.tensors import storage_address

_PR_SET_PDEATHSIG = 1
BY_NAME = ("assumes", "samples")  # functions that receive all values, of which they may have parameters for some
_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}

FindKernel = Callable[[Request], Kernel | str]  # the kernel, or the reason why it was not found
Blocks = Sequence[tuple[str, bytes]]  # devices and contents of storages


class SandboxDied(BaseException):
    """The death of the sandbox; no handler between the call and the judge's loop may treat it as a kernel's error."""


class Sandbox:
    """The judge's end."""

    def __init__(self, find: FindKernel) -> None:
        self._channel, theirs = Pipe()
        judge = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._channel.close()
            os.close(0)  # the judge's channel to the program
            _run(theirs, find, judge)
        theirs.close()

    def find(self, request: Request) -> str | None:
        """Import the kernel in the sandbox. Return None, "differs" if it found another kernel, or why it found none."""
        return self._ask("find", request)[0]["problem"]

    def call(self, role: str, args: Any, kwargs: Any) -> Any:
        """Return the result of a function of the kernel, and apply its writes to the arguments and to torch's
        generators."""
        memory = _Memory()
        tree = memory.describe([list(args), kwargs])
        reply, blocks = self._ask("call", role, tree, memory.places, memory.blocks(), torch.is_grad_enabled())
        results = memory.read(reply, blocks)
        draw(reply["drew"])
        if reply["graph"] is not None:
            flags = reply["differentiable"]
            results = _RemoteCall.apply(self, reply["graph"], memory, flags, results, *memory.tensors)
        return _decode(reply["result"], results)

    def differentiate(self, graph: int, forward: "_Memory", gradients: Sequence[torch.Tensor]) -> list[Any]:
        """Return the gradients of a call's tensor arguments."""
        memory = _Memory(forward)
        memory.describe(list(gradients))
        reply, blocks = self._ask("backward", graph, memory.places, memory.blocks(len(forward.storages)))
        draw(reply["drew"])
        return _decode(reply["result"], memory.read(reply, blocks))

    def _ask(self, *message: Any) -> tuple[Any, list[bytes]]:
        try:
            self._channel.send(message)
            reply = json.loads(self._channel.recv_bytes())
            blocks = [self._channel.recv_bytes() for _ in range(reply["blocks"])]
        except (EOFError, OSError):
            raise SandboxDied from None
        if "raised" in reply:
            name, text, memory = reply["raised"]
            raise (MemoryError(text) if memory else type(str(name), (RuntimeError,), {})(text))
        return reply, blocks

    def die_alike(self) -> None:
        """End this process with the sandbox's exit status or signal."""
        self._channel.close()
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if code >= 0:
            os._exit(code)
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        os._exit(1)


class RemoteFunction:
    """The judge's proxy of a kernel's function; `assumes` and `samples` take all values, by name."""

    def __init__(self, sandbox: Sandbox, role: str, name: str) -> None:
        self.sandbox, self.role = sandbox, role
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.sandbox.call(self.role, args, kwargs)


class _RemoteCall(torch.autograd.Function):
    """A call whose autograd graph is in the sandbox."""

    @staticmethod
    def forward(
        ctx: Any,
        sandbox: Sandbox,
        graph: int,
        memory: "_Memory",
        differentiable: list[bool],
        results: list[torch.Tensor],
        *inputs: torch.Tensor,
    ) -> tuple:
        ctx.sandbox, ctx.graph, ctx.memory, ctx.differentiable = sandbox, graph, memory, differentiable
        non_differentiable = [each for each, moves in zip(results, differentiable, strict=True) if not moves]
        ctx.mark_non_differentiable(*non_differentiable)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple:
        incoming = [each for each, moves in zip(gradients, ctx.differentiable, strict=True) if moves]
        return (None, None, None, None, None, *ctx.sandbox.differentiate(ctx.graph, ctx.memory, incoming))


class _Memory:
    """The storages of a call's tensors, each once. places: the locations of the tensors in them, as JSON."""

    def __init__(self, before: "_Memory | None" = None) -> None:
        self.storages: list[torch.UntypedStorage] = list(before.storages) if before else []
        self.tensors: list[torch.Tensor] = []
        self.places: list[dict[str, Any]] = []

    def describe(self, value: Any) -> dict[str, Any]:
        """Return nested tuples, lists and dicts as JSON, in which a tensor is its index in `tensors`."""
        if isinstance(value, torch.Tensor):
            self._add_tensor(value)
            return {"t": len(self.tensors) - 1}
        if isinstance(value, (tuple, list)):
            return {"(" if isinstance(value, tuple) else "[": [self.describe(each) for each in value]}
        if isinstance(value, dict):
            return {"{": [[str(key), self.describe(each)] for key, each in value.items()]}
        return {"=": value}

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise TypeError(f"a {tensor.layout} tensor cannot be handed to another process")
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        storage = tensor.untyped_storage()
        index = next(
            (i for i, each in enumerate(self.storages) if storage_address(each) == storage_address(storage)),
            len(self.storages),
        )
        if index == len(self.storages):
            self.storages.append(storage)
        self.tensors.append(tensor)
        view = [str(tensor.dtype), list(tensor.shape), list(tensor.stride()), tensor.storage_offset()]
        self.places.append({"storage": index, "view": view, "grad": tensor.requires_grad})

    def blocks(self, start: int = 0) -> Blocks:
        return [(str(each.device), _bytes(each)) for each in self.storages[start:]]

    def add(self, blocks: Blocks) -> None:
        """Add memory of this process with these bytes."""
        self.storages += [_storage(device, content) for device, content in blocks]

    def tensor(self, place: Mapping[str, Any]) -> torch.Tensor:
        """Return a tensor in that memory. Raises RuntimeError if it is out of bounds."""
        dtype, shape, stride, offset = place["view"]
        whole = torch.empty(0, dtype=_DTYPES[dtype], device=self.storages[place["storage"]].device)
        return whole.set_(self.storages[place["storage"]]).as_strided(shape, stride, offset)

    def read(self, reply: Mapping[str, Any], blocks: Sequence[bytes]) -> list[torch.Tensor]:
        """Apply the kernel's writes to this process's tensors, and return the kernel's results."""
        count = len(reply["changed"])
        for index, content in zip(reply["changed"], blocks, strict=False):
            _write(self.storages[index], content)
        memory = _Memory(self)
        memory.add(list(zip(reply["devices"], blocks[count:], strict=True)))
        return [memory.tensor(place) for place in reply["places"]]


def _bytes(storage: torch.UntypedStorage) -> bytes:
    storage = storage.cpu()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


def _storage(device: str, content: bytes) -> torch.UntypedStorage:
    storage = torch.empty(len(content), dtype=torch.uint8, device=device).untyped_storage()
    _write(storage, content)
    return storage


def _write(storage: torch.UntypedStorage, content: bytes) -> None:
    if len(content) != storage.nbytes():
        raise RuntimeError(f"{len(content)} bytes were handed over for memory of {storage.nbytes()}")
    if not content:
        return
    if storage.device.type == "cpu":
        ctypes.memmove(storage.data_ptr(), content, len(content))
    else:
        storage.copy_(_storage("cpu", content))


def _decode(tree: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
    """Decode the pytree that `_Memory.describe` encoded, with other tensors."""
    [(kind, value)] = tree.items()
    if kind == "t":
        return tensors[value]
    if kind in "([":
        items = [_decode(each, tensors) for each in value]
        return tuple(items) if kind == "(" else items
    if kind == "{":
        return {key: _decode(each, tensors) for key, each in value}
    return value


# the sandbox's end


def _run(channel: Connection, find: FindKernel, judge: int) -> None:
    status = 0
    try:
        _end_with(judge)
        os.setsid()  # signals that the kernel sends to its process group reach only this process
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        verifying.active = True
        _KernelServer(channel, find).serve()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        status = 1
    finally:
        os._exit(status)


def _end_with(judge: int) -> None:
    """End this process when the judge dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != judge:
        os._exit(0)


Reply = tuple[dict[str, Any], Sequence[bytes]]


class _KernelServer:
    """The server of one kernel's functions for the judge."""

    def __init__(self, channel: Connection, find: FindKernel) -> None:
        self.channel, self._find = channel, find
        self.kernel: Kernel | None = None
        self.graphs: list[tuple[_Memory, list[bytes], list[torch.Tensor], list[torch.Tensor]]] = []

    def serve(self) -> None:
        """Serve calls until the judge ends."""
        answers: dict[str, Callable[..., Reply]] = {"find": self._take, "call": self._call, "backward": self._backward}
        while True:
            try:
                kind, *message = self.channel.recv()
            except (EOFError, OSError):
                return
            try:
                reply, blocks = answers[kind](*message)
            except Exception as error:
                text = str(error).strip().partition("\n")[0]
                wanting = isinstance(error, (MemoryError, torch.OutOfMemoryError))
                reply, blocks = {"raised": [type(error).__name__, text, wanting]}, []
            self.channel.send_bytes(json.dumps({**reply, "blocks": len(blocks)}).encode())
            for block in blocks:
                self.channel.send_bytes(block)

    def _take(self, request: Request) -> Reply:
        signal.setitimer(signal.ITIMER_REAL, 100 * request.seconds + 600)
        self.graphs.clear()
        result = self._find(request)
        self.kernel = None if isinstance(result, str) else watched(result)
        torch.manual_seed(0)
        torch.rand(())  # else a kernel's own seed of zero would change nothing
        return {"problem": result if isinstance(result, str) else None}, []

    def _call(self, role: str, tree: Any, places: list, blocks: Blocks, grad: bool) -> Reply:
        memory = _Memory()
        memory.add(blocks)
        inputs = [memory.tensor(each).requires_grad_(grad and each["grad"]) for each in places]
        args, kwargs = _decode(tree, inputs)
        function = getattr(self.kernel, role)
        states = random_states()
        with torch.set_grad_enabled(grad):
            result = function(*args, **(taken_values(function, kwargs) if role in BY_NAME else kwargs))
        before = [content for _, content in blocks]
        reply, changes, outputs = self._reply(memory, before, result)
        moving = [each for each in outputs if each.requires_grad]
        if moving:
            self.graphs.append((memory, before, inputs, moving))
        graph = len(self.graphs) - 1 if moving else None
        flags = {"graph": graph, "differentiable": [each.requires_grad for each in outputs]}
        return {**reply, **flags, "drew": changed_states(states)}, changes

    def _backward(self, graph: int, places: list, blocks: Blocks) -> Reply:
        forward, before, inputs, outputs = self.graphs[graph]
        memory = _Memory(forward)
        memory.add(blocks)
        gradients = [memory.tensor(each) for each in places]
        targets = [each for each in inputs if each.requires_grad]
        states = random_states()
        iterator = iter(torch.autograd.grad(outputs, targets, gradients, retain_graph=True, allow_unused=True))
        result = [next(iterator) if each.requires_grad else None for each in inputs]
        reply, changes, _ = self._reply(memory, [*before, *(content for _, content in blocks)], result)
        return {**reply, "drew": changed_states(states)}, changes

    def _reply(
        self, memory: _Memory, before: list[bytes], result: Any
    ) -> tuple[dict[str, Any], list[bytes], list[torch.Tensor]]:
        """Return a call's writes to the received memory, the newly allocated memory, and the tensors of the
        result."""
        count = len(memory.storages)
        extension = _Memory(memory)
        described = extension.describe(result)
        json.dumps(described)  # a result that is not serializable is the kernel's error
        now = [_bytes(each) for each in memory.storages]
        changed = [i for i in range(count) if now[i] != before[i]]
        before[:] = now
        fresh = extension.blocks(count)
        devices = [device for device, _ in fresh]
        reply = {"changed": changed, "devices": devices, "result": described, "places": extension.places}
        return reply, [*(now[i] for i in changed), *(content for _, content in fresh)], extension.tensors
