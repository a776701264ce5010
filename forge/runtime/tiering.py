"""Tiered compilation: a program whose call overhead exceeds its compute time is compiled a second time, as CUDA graphs
or as larger regions, once it was called often.

On a GPU, if that depends on the CPU that makes the calls, the program is measured.
"""

import logging
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from forge.executors.executor import Decision, Declined
from forge.executors.torchex.cudnn_rnn import steps
from forge.ir import TensorProxy, Trace
from forge.ir.locks import new_lock
from forge.ir.printing import STATEMENTS
from forge.ir.proxies import SYMBOLIC_TYPES, hint_of
from forge.ir.pytree import proxies
from forge.transforms.makers import is_view

CALLS_TO_PROMOTE = 16  # to larger regions
CALLS_TO_RECORD = 6  # as CUDA graphs, which takes less time than the first call did
_MEASUREMENTS = 3
_IDLE = 4  # how much shorter calls may be if most find the GPU idle: a backward spreads its work over more calls
_FEWEST = 4  # the fewest calls that larger regions can merge

_log = logging.getLogger("forge")


class _Rates(NamedTuple):
    """Rough rates of a device per second, and the seconds that one call of torch costs.

    share: a program is small if its work takes less than this many times the cost of its calls. A GPU works while the
    next calls are made: their cost is visible only if they take longer.
    """

    flops: float
    bytes: float
    call: float
    share: float


_SLOWEST_CALL = 1e-4  # seconds of one call of torch on a slow CPU

_RATES = {"cpu": _Rates(5e10, 2e10, 4e-6, 4), "cuda": _Rates(4e14, 3e12, 2e-5, 1.5)}


def hidden_seconds(trace: Trace, flops: int, *, may_be_symbolic: bool = False) -> float | None:
    """Return the seconds that the calls of a claimed trace may take without stalling a GPU: 0 if they take longer on
    any CPU, None if they never do.

    Only metadata count, so that the same program is always treated alike. Symbolic sizes have their values at recording
    time, if they may be symbolic; such a program is always measured on a GPU.
    """
    calls = [bound for bound in trace.bound_symbols if bound.symbol not in STATEMENTS]
    edges = {
        proxy.name: proxy
        for bound in calls
        if not is_view(bound)
        for proxy in proxies((bound.args, bound.kwargs, bound.output))
        if isinstance(proxy, TensorProxy)
    }
    devices = {proxy.device.type for proxy in edges.values()}
    if len(devices) > 1:
        devices.discard("cpu")  # of random numbers that models draw there, which do not stall a GPU
    if len(devices) != 1 or not devices <= _RATES.keys():
        return None
    device = devices.pop()
    is_symbolic = any(isinstance(length, SYMBOLIC_TYPES) for proxy in edges.values() for length in proxy.shape)
    if is_symbolic and not may_be_symbolic:
        return None
    count = sum(map(steps, calls)) if device == "cuda" else len(calls)
    if count < _FEWEST:
        return None
    rate = _RATES[device]
    threads = torch.get_num_threads() if device == "cpu" else 1
    moving = [proxy for proxy in edges.values() if proxy.device.type == device]
    traffic = sum(math.prod(map(hint_of, proxy.shape)) * proxy.element_size() for proxy in moving)
    hidden = (flops / (rate.flops * threads) + traffic / rate.bytes) / rate.share
    if hidden < count * rate.call and not (is_symbolic and device == "cuda"):
        return 0.0
    return hidden if device == "cuda" and hidden < count * _SLOWEST_CALL else None


class TierResult(NamedTuple):
    """The second tier of a program: `function` replaces the first tier's once `is_ready` returns True, and never if it
    declines. `install` is called then."""

    function: Callable
    is_ready: Callable[[], Decision]
    install: Callable[[], None]


class TieredProgram:
    """A program that runs its first tier until it was called often and the result of `compile(first tier)` is
    ready.

    hidden_seconds: the time that a call may take without stalling a GPU; the program is compiled a second time
    once all measured calls took longer, or half as long while most found their GPU idle: its backward, or work
    between two calls, stalls it. 0: without a measurement. calls: the number of measured calls; a program that did
    not stall its GPU is measured again later.
    """

    _function: Callable

    def __init__(
        self, compile: Callable[[Callable], TierResult], hidden_seconds: float = 0.0, calls: int | None = None
    ) -> None:
        self._compile: Callable[[Callable], TierResult] | None = compile
        self._second: TierResult | None = None
        self._hidden = hidden_seconds
        self._fastest = math.inf
        self._idle = 0  # calls that found the GPU idle, less those that found it busy
        self._measurements = _MEASUREMENTS
        self._calls = CALLS_TO_PROMOTE if calls is None else calls
        self._countdown = self._calls
        self._lock = new_lock()

    def wrap(self, first: Callable) -> Callable:
        """Return the program's call, which starts as its first tier."""
        self._function = first
        return self.call

    def call(self, *inputs: Any) -> Any:
        """Run the program."""
        if self._countdown and not _is_being_recorded():
            self._countdown -= 1
            if not self._countdown:
                self._end_of_measurement()
            if self._hidden:
                return self._measure(inputs)
        return self._function(*inputs)

    def _end_of_measurement(self) -> None:
        """Promote the program, or begin the next measurement."""
        if self.promote():
            self._measurements -= 1
        if self._compile is not None and self._measurements:
            self._countdown = self._calls * (4 if self._second is None and self._hidden else 1)
            self._fastest, self._idle = math.inf, 0

    def _measure(self, inputs: tuple[Any, ...]) -> Any:
        """Run the program, and record the time of its fastest call: one that no full launch queue delayed."""
        self._idle += 1 if _gpu_is_idle() else -1
        start = time.perf_counter()
        result = self._function(*inputs)
        self._fastest = min(self._fastest, time.perf_counter() - start)
        return result

    def _makes_its_gpu_wait(self) -> bool:
        if not self._hidden:
            return True
        return math.inf > self._fastest >= (self._hidden / _IDLE if self._idle > 0 else self._hidden)

    def promote(self) -> bool:
        """Compile the second tier, or install it if it is ready, without waiting; return whether nothing is left to do.
        That is also so for a program that does not stall its GPU, or was not seen to."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._compile is None:
                return True
            if self._second is None:
                if not self._makes_its_gpu_wait():
                    return True
                self._second = self._compile(self._function)
            ready = self._second.is_ready()
            if ready:
                self._function = self._second.function
                self._second.install()
            elif not isinstance(ready, Declined):
                return False
        except Exception:
            _log.debug("a program keeps its first tier", exc_info=True)
        finally:
            self._lock.release()
        self._compile = self._second = None
        self._hidden = 0.0
        return True


def _is_being_recorded() -> bool:
    """Return whether the caller is capturing a CUDA graph, during which nothing is compiled."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _gpu_is_idle() -> bool:
    """Return whether the current GPU has completed all launched work."""
    return torch.cuda.current_stream().query()
