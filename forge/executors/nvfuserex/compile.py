"""The compilation of a region to a function that nvFuser runs.

The function is tried on zeros of the region's metadata when it is made: regions that nvFuser cannot compile are
declined before the program runs, and the results whose layout differs from torch's are known.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from forge.executors.executor import Declined, decline
from forge.executors.nvfuserex.definition import Definition, Output, define, dump, load
from forge.executors.nvfuserex.translate import dense_strides, strides_in_region, translate
from forge.executors.nvfuserex.writer import Untranslatable
from forge.ir import NumberProxy, Proxy, TensorProxy, Trace
from forge.ir.bounded import BoundedDict
from forge.ir.checks import in_one_line
from forge.ir.locks import new_lock
from forge.ir.proxies import hint_of
from forge.ir.strides import to_strides
from forge.ir.structure import key_of
from forge.ir.unresolved import UnresolvedSymInt
from forge.torch_internals.dispatch import disable_current_modes

KEPT = 4096  # functions of one library

_log = logging.getLogger("forge.nvfuser")
_lock = new_lock()  # nvFuser knows one definition in progress


class Fusion:
    """The function of a region by nvFuser, called with one list.

    `laid_out`: the indices of the results that are copied to memory with torch's strides.
    """

    __slots__ = ("_execute", "_laid_out", "definition")

    def __init__(self, definition: Definition, library: Any, laid_out: Sequence[int]) -> None:
        self.definition = definition
        self.laid_out = laid_out
        self._execute = define(definition, library).execute

    @property
    def laid_out(self) -> tuple[int, ...]:
        return tuple(place for place, _ in self._laid_out)

    @laid_out.setter
    def laid_out(self, places: Sequence[int]) -> None:
        self._laid_out = [(place, self.definition.outputs[place]) for place in places]

    def __call__(self, boxed: list[Any]) -> Sequence[torch.Tensor]:
        results = self.execute(boxed)
        for place, output in self._laid_out:
            results[place] = _laid_out(results[place], output, [*boxed, *results[:place]])
        return results

    def execute(self, boxed: list[Any]) -> list[torch.Tensor]:
        """Return the library's results."""
        places = self.definition.places
        return self._execute(boxed if len(places) == len(boxed) else [boxed[place] for place in places])


def _laid_out(result: torch.Tensor, output: Output, others: Sequence[Any]) -> torch.Tensor:
    """Return a result with torch's strides, in new memory."""
    strides = output.strides or tuple(map(int, dense_strides(result.shape, output.order)))
    laid_out = to_strides(result, strides)
    if output.is_alias and any(torch.is_tensor(each) and _share_memory(each, laid_out) for each in others):
        return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device).copy_(result)
    return laid_out


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class Compiler:
    """A compiler of regions with one library, for devices of one type; regions with the same definition share a
    function."""

    def __init__(self, library: Any, device: str) -> None:
        self.library = library
        self.device = device
        self._fusions: BoundedDict = BoundedDict(KEPT)

    def compile(self, region: Trace) -> Callable | Declined:
        """Return a function of one list, the region's inputs, that returns its outputs. Declined if nvFuser fails."""
        try:
            definition = translate(region, self.library, self.device)
            key = key_of(definition)
            if key not in self._fusions:
                self._fusions[key] = self._make(definition, region)
            return self._fusions[key]
        except UnresolvedSymInt:
            raise
        except Untranslatable as reason:
            return decline(str(reason))
        except Exception as error:
            _log.info("forge: nvFuser cannot compile a region, which torch runs: %s", in_one_line(error))
            _log.debug("%s", region, exc_info=True)
            return decline(f"nvFuser failed: {in_one_line(error)}")

    def _make(self, definition: Definition, region: Trace) -> Fusion:
        with _lock, disable_current_modes(), torch.no_grad():
            fusion = Fusion(definition, self.library, ())
            inputs = [_zeros(proxy) for proxy in region.inputs]
            fusion.laid_out = _mismatched_outputs(fusion.execute(inputs), region.output, definition.outputs)
        return fusion

    def dump(self, fusion: Callable) -> bytes | Declined:
        """Serialize a function to bytes, for `load` in another process."""
        assert isinstance(fusion, Fusion)
        inputs = [*fusion.definition.inputs]
        if any(-1 in getattr(each, "shape", (-1,)) for each in inputs):
            return decline("nvFuser's regions of symbolic sizes are compiled again")
        return dump(fusion.definition, fusion.laid_out)

    def load(self, data: bytes) -> Fusion:
        """Deserialize a dumped function."""
        definition, laid_out = load(data)
        with _lock:
            return Fusion(definition, self.library, laid_out)


def _zeros(proxy: Proxy) -> Any:
    if isinstance(proxy, NumberProxy):
        assert isinstance(proxy.value, (int, torch.SymInt))
        return hint_of(proxy.value)
    assert isinstance(proxy, TensorProxy)
    shape, strides = (list(map(hint_of, each)) for each in (proxy.shape, strides_in_region(proxy)))
    return torch.empty_strided(shape, strides, dtype=proxy.dtype, device=proxy.device).zero_()


def _mismatched_outputs(
    results: Sequence[torch.Tensor], expected: Sequence[TensorProxy], outputs: Sequence[Output]
) -> tuple[int, ...]:
    """Return the results whose layout differs from torch's, or that may share memory with other values. Raises
    TypeError if shape, dtype or device differs."""
    indices = []
    for index, (result, proxy, output) in enumerate(zip(results, expected, outputs, strict=True)):
        shape, strides = (tuple(map(hint_of, each)) for each in (proxy.shape, strides_in_region(proxy)))
        if (tuple(result.shape), result.dtype, result.device) != (shape, proxy.dtype, proxy.device):
            raise TypeError(f"{proxy} came out as {result.dtype}, {tuple(result.shape)}, on {result.device}")
        if output.is_alias or result.stride() != strides:
            indices.append(index)
    return tuple(indices)
