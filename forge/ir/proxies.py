"""Proxies: placeholders for tensors and numbers while a program is traced."""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from forge.ir.checks import check
from forge.ir.state import state

Dim = int | torch.SymInt
if TYPE_CHECKING:

    class Real(Protocol):
        """A real number: a bool, int, float, torch.SymInt, SymFloat or SymBool.

        torch defines most operators of its symbolic numbers at import, so that a type checker does not see them.
        """

        def __add__(self, other: Any, /) -> "Real": ...
        def __radd__(self, other: Any, /) -> "Real": ...
        def __sub__(self, other: Any, /) -> "Real": ...
        def __rsub__(self, other: Any, /) -> "Real": ...
        def __mul__(self, other: Any, /) -> "Real": ...
        def __rmul__(self, other: Any, /) -> "Real": ...
        def __truediv__(self, other: Any, /) -> "Real": ...
        def __rtruediv__(self, other: Any, /) -> "Real": ...
        def __floordiv__(self, other: Any, /) -> "Real": ...
        def __rfloordiv__(self, other: Any, /) -> "Real": ...
        def __mod__(self, other: Any, /) -> "Real": ...
        def __pow__(self, other: Any, /) -> "Real": ...
        def __rpow__(self, other: Any, /) -> "Real": ...
        def __neg__(self) -> "Real": ...
        def __lt__(self, other: Any, /) -> bool: ...
        def __le__(self, other: Any, /) -> bool: ...
        def __gt__(self, other: Any, /) -> bool: ...
        def __ge__(self, other: Any, /) -> bool: ...
        def __int__(self) -> int: ...
        def __round__(self, ndigits: Any = ..., /) -> "Real": ...

    Number = complex | Real
else:
    Real = bool | int | float | torch.SymInt | torch.SymFloat | torch.SymBool
    Number = bool | int | float | complex | torch.SymInt | torch.SymFloat | torch.SymBool
NUMBER_TYPES = (bool, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)
GUESS = 128  # a data-dependent size
SYMBOLIC_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool)
INT_TYPES = (int, torch.SymInt)

_SHORT_DTYPE = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def short_dtype(dtype: torch.dtype) -> str:
    """Return 'f32' for torch.float32, as a printed trace writes it."""
    return _SHORT_DTYPE.get(dtype) or str(dtype).removeprefix("torch.")


def short_type(tensor: "TensorProxy | torch.Tensor") -> str:
    """Return 'f32[2, 3]' for a tensor or a proxy, as a printed trace writes it."""
    return f"{short_dtype(tensor.dtype)}[{', '.join(map(str, tensor.shape))}]"


def hint_of(length: Dim) -> int:
    """Return a size; for a symbolic one, its value at recording time, or a guess if it is data-dependent."""
    if not isinstance(length, SYMBOLIC_TYPES):
        return length
    hint: int | None = length.node.hint
    if hint is not None:
        return hint
    expression = length.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, GUESS)))


def strides_of(tensor: torch.Tensor) -> tuple[Dim, ...] | None:
    """Return a tensor's strides; None if torch lazily conjugates or negates it, so that its memory says
    little."""
    return None if tensor.is_conj() or tensor.is_neg() else tuple(tensor.stride())


class Proxy:
    """A named value of a trace."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class NumberProxy(Proxy):
    """A number known only at run time.

    `value` is the torch.SymInt, SymFloat or SymBool whose expression is the symbol `name`; arithmetic is done on it,
    and a printed expression refers to the symbol.
    """

    __slots__ = ("value",)

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(name)
        self.value: Number = value

    def __repr__(self) -> str:
        return f"{self.name}: {type(self.value).__name__}"


def plain(value: Any) -> Any:
    """Return the number of a NumberProxy; any other value as it is."""
    return value.value if isinstance(value, NumberProxy) else value


def _method(name: str) -> "Callable[..., TensorProxy]":
    """Return an operation of the current language; all but two return one tensor (unbind several, setitem none)."""
    language = state.language
    if language is None or name not in language.methods:
        where = " outside of a trace" if language is None else ""
        advice = _ON_COMPARISONS if name in ("eq", "ne") else ""
        raise TypeError(f"a tensor proxy does not support '{name}'{where}{advice}")
    return language.methods[name]


def _forward(name: str) -> "Callable[[TensorProxy, Any], TensorProxy]":
    return lambda a, b: _method(name)(a, b)


def _reflect(name: str) -> "Callable[[TensorProxy, Any], TensorProxy]":
    return lambda a, b: _method(name)(b, a)


def _unary(name: str) -> "Callable[[TensorProxy], TensorProxy]":
    return lambda a: _method(name)(a)


_ON_COMPARISONS = "; compare proxies by `is` or by .name, and an argument with a number after an isinstance test of it"
_LAYOUT = ("stride", "is_contiguous", "storage_offset", "data_ptr")
_ON_LAYOUT = (
    "; a kernel gets contiguous memory by layout: contiguous in its manifest, or forge.kernel(layout='contiguous'); an "
    "executor's checker reads the attributes strides and offset, which are None where they are not known"
)


class UnknownValueError(TypeError):
    """A proxy's value is read while a program is traced."""


class TorchFunctionError(TypeError):
    """A torch function is called on a proxy where only symbols may be called.

    body: the symbol in whose body that is, or None.
    """

    body: str | None = None

    def __str__(self) -> str:
        (name,) = self.args
        where = "" if self.body is None else f" in the body of {self.body}"
        return (
            f"{name} was called on a tensor proxy{where}, but the current language has no torch functions: a body and "
            f"a rule call symbols, such as forge.torchlang.{name}, and proxies' operators, such as x * y"
        )


class TensorProxy(Proxy):
    """A tensor of a trace: name, shape (ints or torch.SymInt), torch.dtype, torch.device; no data.

    `strides`, and `offset`, the storage offset in elements, are known for inputs and for values that
    Dynamo ran on fake tensors, else None. Operators and methods are looked up in the current language context
    (`a + b`, `a.sum()`), torch functions through `__torch_function__`.
    """

    __slots__ = ("_dtype", "_shape", "device", "offset", "requires_grad", "strides")

    def __init__(
        self,
        name: str,
        shape: tuple[Dim, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        requires_grad: bool = False,
        strides: tuple[Dim, ...] | None = None,
        offset: Dim | None = None,
    ) -> None:
        self.name = name
        self._shape = shape
        self._dtype = dtype
        self.device = device
        self.requires_grad = requires_grad
        self.strides = strides
        self.offset = offset

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def ndim(self) -> int:
        return len(self._shape)

    def numel(self) -> Dim:
        """Return the number of elements."""
        count: Dim = 1
        for size in self._shape:
            count = count * size
        return count

    def element_size(self) -> int:
        """Return the bytes of one element."""
        return self._dtype.itemsize

    def dim(self) -> int:
        return len(self._shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of `dim`."""
        return self._shape if dim is None else self._shape[dim]

    def is_floating_point(self) -> bool:
        return self._dtype.is_floating_point

    def is_complex(self) -> bool:
        return self._dtype.is_complex

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def layout(self) -> torch.layout:
        return torch.strided

    @property
    def T(self) -> "TensorProxy":  # noqa: N802  torch's own name
        return _method("T")(self)

    @property
    def mT(self) -> "TensorProxy":  # noqa: N802  torch's own name
        return _method("mT")(self)

    @property
    def H(self) -> "TensorProxy":  # noqa: N802  torch's own name
        return _method("H")(self)

    @property
    def mH(self) -> "TensorProxy":  # noqa: N802  torch's own name
        return _method("mH")(self)

    @property
    def real(self) -> "TensorProxy":
        return _method("real")(self)

    @property
    def imag(self) -> "TensorProxy":
        return _method("imag")(self)

    @property
    def data(self) -> "TensorProxy":
        return _method("data")(self)

    def __len__(self) -> int:
        check(self.ndim > 0, lambda: "len() of a 0-d tensor", TypeError)
        return int(self._shape[0])

    def __iter__(self) -> "Iterator[TensorProxy]":
        check(self.ndim > 0, lambda: "iteration over a 0-d tensor", TypeError)
        return iter(_method("unbind")(self, 0))

    def __bool__(self) -> bool:
        raise UnknownValueError(
            f"the value of {self} is not known while tracing: a branch on it cannot be traced; "
            "use torch.where, or forge.jit, which breaks the graph there"
        )

    def _read(self, *args: Any, **kwargs: Any) -> Any:
        raise UnknownValueError(
            f"the value of {self} is not known while tracing: it cannot be made a number of Python's or an array; "
            "keep it a tensor, or use forge.jit, which goes on where it is read"
        )

    __float__ = __int__ = __index__ = __complex__ = __array__ = item = tolist = numpy = _read

    __add__, __radd__, __iadd__ = _forward("add"), _reflect("add"), _forward("iadd")
    __sub__, __rsub__, __isub__ = _forward("sub"), _reflect("sub"), _forward("isub")
    __mul__, __rmul__, __imul__ = _forward("mul"), _reflect("mul"), _forward("imul")
    __truediv__, __rtruediv__, __itruediv__ = _forward("truediv"), _reflect("truediv"), _forward("itruediv")
    __floordiv__, __rfloordiv__, __ifloordiv__ = _forward("floordiv"), _reflect("floordiv"), _forward("ifloordiv")
    __mod__, __rmod__, __imod__ = _forward("mod"), _reflect("mod"), _forward("imod")
    __pow__, __rpow__, __ipow__ = _forward("pow"), _reflect("pow"), _forward("ipow")
    __matmul__, __rmatmul__, __imatmul__ = _forward("matmul"), _reflect("matmul"), _forward("imatmul")
    __and__, __rand__, __iand__ = _forward("and_"), _reflect("and_"), _forward("iand")
    __or__, __ror__, __ior__ = _forward("or_"), _reflect("or_"), _forward("ior")
    __xor__, __rxor__, __ixor__ = _forward("xor"), _reflect("xor"), _forward("ixor")
    __lshift__, __rlshift__, __ilshift__ = _forward("lshift"), _reflect("lshift"), _forward("ilshift")
    __rshift__, __rrshift__, __irshift__ = _forward("rshift"), _reflect("rshift"), _forward("irshift")

    __eq__ = _forward("eq")  # type: ignore[assignment]  # elementwise, as torch's, where object's is a bool
    __ne__ = _forward("ne")  # type: ignore[assignment]  # so is this one
    __lt__ = _forward("lt")
    __le__ = _forward("le")
    __gt__ = _forward("gt")
    __ge__ = _forward("ge")
    __neg__, __pos__, __abs__, __invert__ = _unary("neg"), _unary("pos"), _unary("abs"), _unary("invert")

    if TYPE_CHECKING:  # the methods of every language, found by __getattr__, that rules call

        def _operation(self, *args: Any, **kwargs: Any) -> "TensorProxy": ...

        amax = amin = conj = diagonal = exp = expand = lgamma = log = permute = prod = sqrt = sum = to = _operation
        tril = triu = unsqueeze = where = zeta = _operation

    def __getitem__(self, key: Any) -> "TensorProxy":
        return _method("getitem")(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _method("setitem")(self, key, value)

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"{self.name}: {short_type(self)} {self.device}"

    def __getattr__(self, name: str) -> Any:
        if name == "name":  # copy.copy asks an empty proxy for __setstate__: the message below would recurse
            raise AttributeError(name)
        language = state.language
        method = None if language is None else language.methods.get(name)
        if method is None:
            where = " outside of a trace" if language is None else ""
            is_core = language is not None and language.call_torch_function is None
            how = "is no method in metas, bodies and rules: call forge.torchlang" if is_core else "is not traced"
            of_torch = f": torch.Tensor.{name} {how}" if hasattr(torch.Tensor, name) else ""
            advice = _ON_LAYOUT if name in _LAYOUT else ""
            raise AttributeError(f"a tensor proxy ({self}) has no attribute '{name}'{where}{of_torch}{advice}")
        return _BoundMethod(method, self)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        language = state.language
        if language is None or language.call_torch_function is None:
            raise TorchFunctionError(getattr(func, "__name__", func))
        return language.call_torch_function(func, args, kwargs or {})


class _BoundMethod:
    """A method of the current language bound to a proxy."""

    __slots__ = ("_method", "_self")

    def __init__(self, method: Callable[..., Any], proxy: TensorProxy) -> None:
        self._method = method
        self._self = proxy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(self._self, *args, **kwargs)


def differentiable(value: Any) -> bool:
    """Return whether it is a tensor, or the proxy of one, whose dtype has gradients."""
    return isinstance(value, (TensorProxy, torch.Tensor)) and (value.dtype.is_floating_point or value.dtype.is_complex)


def bytes_of(x: TensorProxy) -> int:
    """Return the bytes of a value; symbolic sizes have their values at capture time."""
    return math.prod(map(hint_of, x.shape)) * x.dtype.itemsize
