"""Names around a Python function that it reads, found in its bytecode; nothing is run."""

import dis
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

_READS = frozenset(
    "LOAD_GLOBAL LOAD_NAME LOAD_DEREF LOAD_CLASSDEREF LOAD_FROM_DICT_OR_GLOBALS LOAD_FROM_DICT_OR_DEREF".split()
)
_ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
# names by which code reaches what cannot be read off it: other code, files, the environment, libraries
_BEYOND = frozenset(
    "eval exec globals vars open import_module __import__ environ getenv CDLL PyDLL LoadLibrary load_library".split()
)


@dataclass(frozen=True)
class NameRead:
    """A name that is read, and the attributes that are taken of it: Read("torch", ("ops", "acme", "f"))."""

    name: str
    path: tuple[str, ...] = ()


@dataclass(frozen=True)
class Import:
    """An import within a function: of a module, or of names in it."""

    module: str
    level: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reads:
    """Names and modules that a function and those defined in it read. `beyond` is the name by which it reaches further
    than its bytecode shows (`globals`, `eval`), or None."""

    names: tuple[NameRead, ...]
    imports: tuple[Import, ...]
    beyond: str | None


@lru_cache(maxsize=4096)
def reads_of(code: types.CodeType) -> Reads:
    """Return the names that code reads, each once, in order."""
    codes = list(_nested_codes(code))
    names = dict.fromkeys(read for each in codes for read in _names(each))
    imports = dict.fromkeys(statement for each in codes for statement in _imports(each))
    beyond = sorted(_BEYOND.intersection(name for each in codes for name in each.co_names))
    return Reads(tuple(names), tuple(imports), beyond[0] if beyond else None)


def _nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _nested_codes(each)


def _names(code: types.CodeType) -> Iterator[NameRead]:
    instructions = list(dis.get_instructions(code))
    for index, instruction in enumerate(instructions):
        if instruction.opname in _READS:
            path = []
            for following in instructions[index + 1 :]:
                if following.opname not in _ATTRIBUTES:
                    break
                path.append(following.argval)
            yield NameRead(instruction.argval, tuple(path))


def _imports(code: types.CodeType) -> Iterator[Import]:
    instructions = list(dis.get_instructions(code))
    for index, instruction in enumerate(instructions):
        if instruction.opname == "IMPORT_NAME":
            level, names = (each.argval for each in instructions[index - 2 : index])
            yield Import(instruction.argval, level, tuple(names or ()))
