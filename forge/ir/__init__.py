"""The intermediate representation: symbols, proxies, traces, printing. Imports nothing else of forge."""

from forge.ir.checks import check
from forge.ir.grad_rules import end_grad, get_grad, needs_grad, put_grad, register_grad
from forge.ir.proxies import (
    INT_TYPES,
    NUMBER_TYPES,
    SYMBOLIC_TYPES,
    Dim,
    Number,
    NumberProxy,
    Proxy,
    Real,
    TensorProxy,
    differentiable,
    short_dtype,
    short_type,
    strides_of,
)
from forge.ir.state import LanguageContext, set_language
from forge.ir.symbol import BoundSymbol, Symbol, Tag
from forge.ir.trace import Trace, current_trace, outside_regions, recording

__all__ = [
    "INT_TYPES",
    "NUMBER_TYPES",
    "SYMBOLIC_TYPES",
    "BoundSymbol",
    "Dim",
    "LanguageContext",
    "Number",
    "NumberProxy",
    "Proxy",
    "Real",
    "Symbol",
    "Tag",
    "TensorProxy",
    "Trace",
    "check",
    "current_trace",
    "differentiable",
    "end_grad",
    "get_grad",
    "needs_grad",
    "outside_regions",
    "put_grad",
    "recording",
    "register_grad",
    "set_language",
    "short_dtype",
    "short_type",
    "strides_of",
]
