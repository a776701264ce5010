"""Inductor's compiler: lowerings, decompositions, compile_fx."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._inductor import lowering as lowering
from torch._inductor.compile_fx import compile_fx_inner as compile_fx_inner
from torch._inductor.compile_fx import get_cpp_wrapper_config as get_cpp_wrapper_config
from torch._inductor.decomposition import select_decomp_table as select_decomp_table
from torch._inductor.output_code import CompiledAOTI as CompiledAOTI
from torch._inductor.output_code import CompiledFxGraph as CompiledFxGraph


@contextmanager
def call_kernels(operators: Iterable[Any]) -> Iterator[None]:
    """Have Inductor call torch's kernels for operators that it would decompose and has no lowering for."""
    added = [each for each in dict.fromkeys(operators) if each not in lowering.lowerings]
    lowering.lowerings.update((each, lowering.fallback_handler(each, add_to_fallback_set=False)) for each in added)
    try:
        yield
    finally:
        for each in added:
            del lowering.lowerings[each]


@contextmanager
def quiet_lowering() -> Iterator[None]:
    """Have Inductor not warn of operators that it calls by its proxy executor."""
    log = logging.getLogger("torch._inductor.ir")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
