"""Messages that gather parameters and reduce gradients: bucketed, started early, awaited late.

`bucket_collectives` runs before executors are queried and joins calls into messages: parameters that the program reads
consecutively are gathered by one message of up to a bucket's bytes, and their gradients are reduced likewise. Messages
start in one order on every rank, determined by the order in which the captured program reads its parameters, and by
their sizes. Regions preserve it (forge/compiler/regions.py), and so does `overlap_collectives`, which moves messages
between the calls as they run: one starts right after the one before it, a gather not before a bucket ahead of it by the
policy's bytes is read, which bounds memory, and a reduction once its last gradient is computed. A gather is awaited
before the first call that reads one of its parameters, a reduction before the second after it starts, or more if
together they have the policy's bytes at most. No message moves across another call that sends.

Source: S. Li et al., PyTorch Distributed (2020), for buckets; Y. Zhao et al., PyTorch FSDP (2023), for gathering ahead.
"""

from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from forge import prims
from forge.ir import BoundSymbol, Symbol, Tag, TensorProxy, Trace
from forge.ir.proxies import Dim, bytes_of
from forge.ir.symbol import NO_TAGS
from forge.prims.distributed import MESSAGE_TAGS, ShardGroup, chunk_rows
from forge.transforms.makers import innermost, is_view
from forge.transforms.unshards import is_reduction, is_unshard, limits

_SILENT = frozenset({prims.copy_, prims.copy_data_, prims.require, prims.wait_tensor})  # side effects that send nothing
_READ_WITH = 3  # matrices, such as those of queries, keys and values
_NO_LIMITS = 1 << 26, 1 << 26  # of gathers that the captured program does not have, such as in a double backward


class Operators(NamedTuple):
    """Operators of the executor that sends, on lists with an item per parameter."""

    start_unshard: Symbol
    finish_unshard: Symbol
    start_reduce: Symbol
    finish_reduce: Symbol


class Parameter(NamedTuple):
    """A parameter of the captured program. first, last: the indices of the first and last call that read it.
    bucket, prefetch: the bytes of its policy."""

    first: int
    last: int
    bucket: int
    prefetch: int


Parameters = Mapping[str, Parameter]  # by the names of the gathered shards
_Write = Callable[[Sequence[BoundSymbol], set[str]], list[BoundSymbol]]


def find_parameters(program: Trace) -> Parameters:
    """Return the parameters that a captured program gathers.

    Those of one dim count as read with the matrices after them, where recomputed values of a norm or a bias are read.
    """
    part_of: dict[str, str] = {}  # by the name of a gathered value or a view of it
    parameters: dict[str, Parameter] = {}
    small: set[str] = set()
    for place, bound in enumerate(program.bound_symbols):
        for name in bound.inputs:
            if name in part_of:
                parameters[part_of[name]] = parameters[part_of[name]]._replace(last=place)
        if is_unshard(bound):
            part = bound.args[0].name
            bucket, prefetch = limits(bound) or _NO_LIMITS
            parameters.setdefault(part, Parameter(place, place, bucket, prefetch))
            part_of[bound.output.name] = part
            if bound.output.ndim < 2:
                small.add(part)
        elif bound.inputs and bound.inputs[0] in part_of and is_view(bound):
            part_of.update(dict.fromkeys(bound.outputs, part_of[bound.inputs[0]]))
    matrices = sorted(each.last for part, each in parameters.items() if part not in small)
    for part in small:
        after = matrices[bisect(matrices, parameters[part].last) :][:_READ_WITH]
        parameters[part] = parameters[part]._replace(last=max([parameters[part].last, *after]))
    return parameters


class _Call(NamedTuple):
    """A call to be sent: a gather or a reduction. time: when its result is read, or its argument made, in program
    order. bytes: of the full tensor."""

    bound: BoundSymbol
    time: int
    bytes: int
    bucket: int


class _Message:
    """Calls that are sent together. bytes: of the full tensors. prefetch: the bytes that may be gathered ahead.
    waits_for: its inputs that are not computed yet."""

    def __init__(self, start: BoundSymbol, finish: BoundSymbol, bytes: int, prefetch: int) -> None:
        self.start = start
        self.finish = finish
        self.bytes = bytes
        self.prefetch = prefetch
        self.waits_for: set[str] = set()
        self.started = False
        self.finished = False


def has_messages(trace: Trace) -> bool:
    """Return whether a trace has calls to be sent."""
    return any(_is_sent(bound) or _hides_sent(bound) for bound in trace.bound_symbols)


def bucket_collectives(
    trace: Trace, parameters: Parameters, operators: Operators, inputs: Sequence[str] | None = None
) -> Trace:
    """Return the trace with parameters gathered, and gradients reduced, by messages.

    inputs: of a backward, the names of the program's inputs, whose gradients are its outputs: it reads the parameters
    in reverse program order.
    """
    new = trace.derive("bucket_collectives", [])
    calls = list(_in_sight(trace.bound_symbols))
    owners = {} if inputs is None else _owners(trace.output, calls, inputs)
    bucketing = _Bucketing(new, parameters, operators, owners, backward=inputs is not None)
    new.bound_symbols = _by_segment(calls, trace.output_names, bucketing.write)
    return new


def overlap_collectives(trace: Trace, parameters: Parameters, operators: Operators) -> Trace:
    """Return the claimed trace with its messages overlapping computation."""

    def write(segment: Sequence[BoundSymbol], needed: set[str]) -> list[BoundSymbol]:
        finishes = {bound.args[0][0].name: bound for bound in segment if Tag.AWAITS in bound.symbol.tags}
        sequence = []
        for bound in segment:
            if Tag.SENDS in bound.symbol.tags:
                finish = finishes[bound.output[0].name]
                gathers = bound.symbol is operators.start_unshard
                wholes = finish.output if gathers else bound.args[0]
                prefetch = _prefetch(parameters, bound.args[0][0].name)
                sequence.append(_Message(bound, finish, sum(map(bytes_of, wholes)), prefetch))
        others = [bound for bound in segment if MESSAGE_TAGS.isdisjoint(bound.symbol.tags)]
        return _Writer(sequence, operators).write(others, needed)

    return trace.derive("overlap_collectives", _by_segment(trace.bound_symbols, trace.output_names, write))


def _is_sent(bound: BoundSymbol) -> bool:
    return is_unshard(bound) or is_reduction(bound)


def _hides_sent(bound: BoundSymbol) -> bool:
    """Return whether a composite contains calls to be sent, and may be decomposed."""
    if _is_sent(bound) or Tag.OPAQUE_TO_PASSES in bound.tags or Tag.NO_FUSE not in bound.all_tags:
        return False
    return any(map(_is_sent, innermost(bound)))


def _in_sight(calls: Iterable[BoundSymbol]) -> Iterator[BoundSymbol]:
    """Yield the calls, with composites that contain calls to be sent decomposed."""
    for bound in calls:
        yield from _in_sight(bound.subsymbols) if _hides_sent(bound) else (bound,)


def _sends(bound: BoundSymbol) -> bool:
    if Tag.EFFECT not in bound.all_tags:
        return False
    return any(Tag.EFFECT in call.symbol.tags and call.symbol not in _SILENT for call in innermost(bound))


def _by_segment(calls: Sequence[BoundSymbol], outputs: Iterable[str], write: _Write) -> list[BoundSymbol]:
    """Return the calls with each segment between two calls that send replaced by `write`'s result for it and the names
    that are read after it."""
    segments: list[list[BoundSymbol]] = [[]]
    for bound in calls:
        if _sends(bound):
            segments += [[bound], []]
        else:
            segments[-1].append(bound)
    needed = set(outputs)
    chunks: list[list[BoundSymbol]] = []
    for segment in reversed(segments):
        chunks.append(write(segment, needed))
        needed.update(name for bound in segment for name in bound.inputs)
    return [bound for segment in reversed(chunks) for bound in segment]


def _independent(segment: Sequence[BoundSymbol]) -> int:
    """Return the number of calls of a segment before one that can share a message with none of them, and depends on
    none: it gathers a sent value, or reduces a reduced one. All calls if there is none, as in a first backward."""
    gathers, reductions = set[str](), set[str]()
    for place, bound in enumerate(segment):
        if _is_sent(bound) and not (gathers if is_unshard(bound) else reductions).isdisjoint(bound.inputs):
            return place
        if _is_sent(bound) or not gathers.isdisjoint(bound.inputs):
            gathers.update(bound.outputs)
        if is_reduction(bound) or not reductions.isdisjoint(bound.inputs):
            reductions.update(bound.outputs)
    return len(segment)


def _owners(outputs: Iterable[object], calls: Sequence[BoundSymbol], inputs: Sequence[str]) -> dict[str, str]:
    """Return the input whose gradient a reduction computes, at least in part, by the name of its result."""
    pairs = zip(outputs, inputs, strict=False)
    owners = {x.name: name for x, name in pairs if isinstance(x, TensorProxy)}
    for bound in reversed(calls):
        if not is_reduction(bound):
            for name in bound.outputs:
                if name in owners:
                    for read in bound.inputs:
                        owners.setdefault(read, owners[name])
    return owners


class _Bucketing(NamedTuple):
    """Builder of messages from the calls of a segment, in program order."""

    new: Trace
    parameters: Parameters
    operators: Operators
    owners: Mapping[str, str]
    backward: bool

    def write(self, segment: Sequence[BoundSymbol], needed: set[str]) -> list[BoundSymbol]:
        independent = _independent(segment)
        if independent < len(segment):
            segment, rest = segment[:independent], segment[independent:]
            after = self.write(rest, needed)
            return [*self.write(segment, needed.union(*[bound.inputs for bound in rest])), *after]
        gathers, reductions = self.find_calls(segment)
        if not gathers and not reductions:
            return list(segment)
        sequence = self.in_order(_buckets(gathers), _buckets(reductions))
        others = [bound for bound in segment if not _is_sent(bound)]
        return _Writer(sequence, self.operators).write(others, needed)

    def find_calls(self, segment: Sequence[BoundSymbol]) -> tuple[list[_Call], list[_Call]]:
        """Return the calls that gather and those that reduce, each in order of time."""
        readers: dict[str, int] = {}
        for place, bound in enumerate(segment):
            for name in bound.inputs:
                readers.setdefault(name, place)
        gathers, reductions = [], []
        for place, bound in enumerate(segment):
            if is_unshard(bound):
                parameter = self.parameters.get(bound.args[0].name)
                time = readers.get(bound.output.name, len(segment))
                if parameter is not None:
                    time = -parameter.last if self.backward else parameter.first
                gathers.append(_Call(bound, time, bytes_of(bound.output), (parameter or _NO_LIMITS)[-2]))
            elif is_reduction(bound):
                parameter = self.parameters.get(self.owners.get(bound.output.name, ""))
                time = place if parameter is None else -parameter.first
                reductions.append(_Call(bound, time, bytes_of(bound.args[0]), (parameter or _NO_LIMITS)[-2]))
        gathers.sort(key=lambda call: call.time)
        reductions.sort(key=lambda call: call.time)
        return gathers, reductions

    def in_order(self, gathers: list[list[_Call]], reductions: list[list[_Call]]) -> list[_Message]:
        """Return all messages in order: a reduction follows the gathers of parameters read before its gradients exist,
        and those that may have started by then."""
        messages = [self.message(calls) for calls in gathers]
        sequence: list[_Message] = []
        position = 0
        for calls in reductions:
            time = calls[-1].time
            before = sum(gather[0].time <= time for gather in gathers)
            until = min(_ahead(messages, before - 1) + 1, len(messages))
            sequence += [*messages[position:until], self.message(calls)]
            position = max(position, until)
        return [*sequence, *messages[position:]]

    def message(self, calls: Sequence[_Call]) -> _Message:
        bounds = [call.bound for call in calls]
        values, lengths = [bound.args[0] for bound in bounds], [bound.args[1] for bound in bounds]
        device: torch.device = bounds[0].args[3]
        group: ShardGroup = bounds[0].args[5]
        size, *_ = group
        gathers = is_unshard(bounds[0])
        if gathers:
            start, finish = self.operators.start_unshard, self.operators.finish_unshard
            dtypes, more = [bound.args[2] for bound in bounds], []
            shapes = [_padded(bound.output, size, length) for bound, length in zip(bounds, lengths, strict=True)]
        else:
            start, finish = self.operators.start_reduce, self.operators.finish_reduce
            dtypes = [bound.args[4] or bound.args[0].dtype for bound in bounds]
            read = [x for x, dtype in zip(values, dtypes, strict=True) if x.dtype is dtype]  # else a copy is
            more = [[bound.args[2] for bound in bounds], read]
            shapes = [_part(bound.args[0], size) for bound in bounds]
        hint = "gathering" if gathers else "reducing"
        handles = tuple(
            self.new.tensor(shape, dtype, device, name=hint) for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        tags, source = NO_TAGS.union(*[bound.tags for bound in bounds]), bounds[0].source
        results = tuple(bound.output for bound in bounds)
        return _Message(
            BoundSymbol(start, (values, lengths, dtypes, device, group), {}, handles, (), source, tags),
            BoundSymbol(finish, (list(handles), lengths, *more), {}, results, (), source, tags),
            sum(call.bytes for call in calls),
            _prefetch(self.parameters, values[0].name),
        )


def _buckets(calls: Iterable[_Call]) -> list[list[_Call]]:
    buckets: list[list[_Call]] = []
    bytes = 0
    for call in calls:
        same = bool(buckets) and _way(buckets[-1][0]) == _way(call)
        if not same or bytes + call.bytes > call.bucket:
            buckets.append([])
            bytes = 0
        buckets[-1].append(call)
        bytes += call.bytes
    return buckets


def _way(call: _Call) -> tuple[torch.device, ShardGroup]:
    """Return the device of a call's result, and the group; a message's calls must agree in them."""
    device, group = call.bound.args[3], call.bound.args[5]
    return device, group


def _prefetch(parameters: Parameters, name: str) -> int:
    """Return the bytes of the policy of a parameter that is sent; for a gradient, the maximum of all policies."""
    if name in parameters:
        return parameters[name].prefetch
    return max((each.prefetch for each in parameters.values()), default=_NO_LIMITS[1])


def _ahead(gathers: Sequence[_Message], read: int) -> int:
    """Return the last gather that may start once the gather `read` is awaited: at least the next one."""
    last, bytes = read + 1, 0
    for i, message in enumerate(gathers[read + 1 :], read + 1):
        bytes += message.bytes
        if i > last and bytes > message.prefetch:
            break
        last = i
    return last


class _Writer:
    """Writer of calls with messages between them, each as early as its position in the sequence, its inputs and the
    memory limit allow, and awaited as late as possible."""

    def __init__(self, sequence: Sequence[_Message], operators: Operators) -> None:
        self.sequence = sequence
        self.gathers = [each for each in sequence if each.start.symbol is operators.start_unshard]
        self.reductions = [each for each in sequence if each.start.symbol is operators.start_reduce]
        self.places = {id(each): i for i, each in enumerate(self.gathers)}
        self.makers = {name: each for each in sequence for name in each.finish.outputs}
        self.waiting: dict[str, list[_Message]] = {}  # by the name of the missing input
        self.reached = 0  # the next message of the sequence
        self.allowed = _ahead(self.gathers, -1)  # the last gather that may start
        self.in_flight: list[_Message] = []  # the reductions
        self.calls: list[BoundSymbol] = []

    def write(self, others: Sequence[BoundSymbol], needed: Iterable[str]) -> list[BoundSymbol]:
        """Return the calls. needed: the names that are read after them."""
        outputs = {name for bound in others for name in bound.outputs} | self.makers.keys()
        for message in self.sequence:
            message.waits_for = outputs.intersection(message.start.inputs)  # else it is ready at the start
            for name in message.waits_for:
                self.waiting.setdefault(name, []).append(message)
        self.start_next()
        for bound in others:
            self.read(bound.inputs)
            self.put(bound)
            self.start_next()
        self.read([name for name in self.makers if name in needed])
        for message in self.sequence:
            self.finish(message)
        return self.calls

    def put(self, bound: BoundSymbol) -> None:
        self.calls.append(bound)
        for name in bound.outputs:
            for message in self.waiting.pop(name, ()):
                message.waits_for.discard(name)

    def read(self, names: Iterable[str]) -> None:
        """Finish the messages that deliver these, in order."""
        messages = {id(self.makers[name]): self.makers[name] for name in names if name in self.makers}
        for message in messages.values():
            self.finish(message)

    def start_next(self) -> None:
        """Start the next messages, as far as the limits allow."""
        while self.reached < len(self.sequence):
            message = self.sequence[self.reached]
            if not message.started:
                if message.waits_for or self.places.get(id(message), -1) > self.allowed:
                    return
                self.start(message)
            self.reached += 1

    def start(self, message: _Message) -> None:
        message.started = True
        if id(message) not in self.places:
            while len(self.in_flight) > 1 and sum(each.bytes for each in (*self.in_flight, message)) > message.prefetch:
                self.finish(self.in_flight[0])
            self.in_flight.append(message)
        self.put(message.start)

    def finish(self, message: _Message) -> None:
        if message.finished:
            return
        if not message.started:
            for each in self.sequence[self.reached : self.sequence.index(message) + 1]:
                if not each.started and not each.waits_for:  # one that depends on these results starts later
                    self.start(each)
        message.finished = True
        if message in self.in_flight:
            self.in_flight.remove(message)
        self.put(message.finish)
        if id(message) in self.places:
            self.allowed = max(self.allowed, _ahead(self.gathers, self.places[id(message)]))
            self.start_next()


def _padded(whole: TensorProxy, size: int, length: int | None) -> tuple[Dim, ...]:
    """Return the shape of gathered shards, padded to one size."""
    return whole.shape if length is None else (chunk_rows(length, size) * size, *whole.shape[1:])


def _part(whole: TensorProxy, size: int) -> tuple[Dim, ...]:
    """Return the shape of a reduced shard; of a number, each rank sends a copy to each."""
    return (chunk_rows(whole.shape[0], size), *whole.shape[1:]) if whole.ndim else (1,)
