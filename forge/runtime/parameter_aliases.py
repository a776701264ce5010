"""Writes to parameters that torch does not count: through `p.data`, which has its own version counter, and through an
array of `p.numpy()`, which has none.

torch has no hook for either. While a frozen program has values of a parameter, aliases of its memory are therefore
recorded: when the first such program runs, `torch.nn.Parameter` gets replacements of `data` and `numpy`
(torch_internals/parameters.py), which record aliases of watched parameters and behave as torch's for all others.
Aliases are recorded by weak references, so that no lifetime is longer than in eager. Other tensors (buffers,
`p.detach()`) keep torch's functions.
"""

import functools
import weakref
from collections.abc import Collection
from typing import Any

import torch

from forge.ir.locks import new_lock
from forge.torch_internals.parameters import follow_data, follow_numpy, note_alias
from forge.torch_internals.tensors import version_of

_LIMIT = 64  # references in one entry, before dead ones are removed

_lock = new_lock()
_watched: dict[int, weakref.ref] = {}
open_aliases: dict[int, "_Aliases"] = {}
"""By the id of a watched parameter: what may write to it, or may have written. Empty nearly always."""


class _Aliases:
    """Aliases of a parameter that may be alive, each with its last known version; None for an array, which has
    none."""

    __slots__ = ("aliases", "changed")

    def __init__(self) -> None:
        self.aliases: list[tuple[weakref.ref, int | None]] = []
        self.changed = False

    def add(self, alias: Any) -> None:
        if len(self.aliases) >= _LIMIT:
            self.changed = self.look()
        version = version_of(alias) if isinstance(alias, torch.Tensor) else None
        self.aliases.append((weakref.ref(alias), version))

    def look(self) -> bool:
        """Return whether there may have been writes since the last look: through an alias whose version changed or
        that is gone, or through an array."""
        changed, alive = self.changed, []
        for reference, last_version in self.aliases:
            alias = reference()
            version = None if alias is None or last_version is None else version_of(alias)
            changed |= version is None or version != last_version
            if alias is not None:
                alive.append((reference, version))
        self.aliases, self.changed = alive, False
        return changed


def watch(tensors: Collection[torch.Tensor]) -> None:
    """Record aliases of those of these tensors that are parameters, from now until they die."""
    _follow_aliases()
    for each in tensors:
        if isinstance(each, torch.nn.Parameter) and id(each) not in _watched:
            _watched[id(each)] = weakref.ref(each, functools.partial(_forget, id(each)))


def unwatch(ids: Collection[int]) -> None:
    """Stop recording aliases of these parameters."""
    for each in ids:
        _forget(each)


def changed_parameters(ids: Collection[int]) -> list[int]:
    """Return those of these parameters that may have been written to, uncounted, since the last call."""
    result = []
    with _lock:
        for each in ids:
            entry = open_aliases.get(each)
            if entry is not None and entry.look():
                result.append(each)
            if entry is not None and not entry.aliases:
                open_aliases.pop(each, None)
    return result


@functools.cache
def _follow_aliases() -> None:
    follow_data.__enter__()
    follow_numpy.__enter__()


@note_alias.provide
def _note(parameter: torch.Tensor, alias: Any) -> None:
    if id(parameter) in _watched:
        with _lock:
            open_aliases.setdefault(id(parameter), _Aliases()).add(alias)


def _forget(key: int, _: Any = None) -> None:
    _watched.pop(key, None)
    open_aliases.pop(key, None)
