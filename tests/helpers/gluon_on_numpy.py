"""Runs the Hopper kernels on numpy: their source, executed with stand-ins for Gluon.

Barriers, tile copies and products mean what they mean on the GPU, but for time.  The warp partitions of a program are
coroutines, which go on as far as they can.  By default the last of them, the producer, goes on at once when something becomes
free, and its copies arrive at once; `late`, they arrive when they are waited for.  A product is computed when it is waited
for.  So it shows when a tile is given back too early, a result is read too early, or a wait is in vain.  Layouts are not
looked at, and programs run one after the other, but for those of a kernel that runs `together`, all at once, the last ones first
wherever they may.
"""

import collections
import contextlib
import functools
import importlib.util
import sys
import threading
import types

import jax.numpy as jnp
import numpy as np
import pytest

import mutants
from jax_flash_jvp import interpret
from jax_flash_jvp.kernels.features import Features
from jax_flash_jvp.kernels.hopper import config  # noqa: F401 (before anything stands in for Gluon)
from jax_flash_jvp.kernels.launcher import DESCRIBED, InPlace, Rows

PACKAGE = "jax_flash_jvp.kernels.hopper"
# of the kernels, each behind those that it imports
MODULES = (
    "products", "ring", "programs", "handover", "visibility", "blocks", "skeleton", "steps", "step_plain", "step_dual", "forward",
    "two_sides", "adding", "step_one_pass", "step_one_pass_dual", "one_pass", "around_one_pass",
)  # fmt: skip


class Block(np.ndarray):
    """A tensor in registers."""

    def to(self, dtype, bitcast=False):
        return (self.view(dtype) if bitcast else self.astype(dtype)).view(Block)

    def __iadd__(self, other):  # another value, as for every tensor
        return self + other

    def __isub__(self, other):
        return self - other

    type = types.SimpleNamespace(layout=None)

    def permute(self, order):
        return self.transpose(order)

    def split(self):
        return self[..., 0], self[..., 1]

    def __array_wrap__(self, array, context=None, return_scalar=False):
        return np.asarray(array).view(Block)


def block(a, dtype=None):
    return np.array(a, dtype).view(Block)


class Pointer:
    """An address in an array, or many."""

    def __init__(self, array, offset=0):
        self.flat, self.offset = array.reshape(-1), offset
        self.dtype = types.SimpleNamespace(element_ty=array.dtype)

    def __add__(self, offset):
        return Pointer(self.flat, self.offset + offset)

    def to(self, dtype):  # an address as an integer
        return self


def load(pointer, mask=True, other=0.0):
    place = np.asarray(pointer.offset)
    mask, place = np.broadcast_arrays(mask, place)
    return block(np.where(mask, pointer.flat[np.where(mask, place, 0)], np.asarray(other, pointer.flat.dtype)))


def store(pointer, value, mask=True):
    mask, place, value = np.broadcast_arrays(mask, pointer.offset, value)
    pointer.flat[place[mask]] = value[mask].astype(pointer.flat.dtype)


class Shared:
    """Shared memory, full of NaN at first."""

    def __init__(self, array):
        self.array, self.dtype = array, array.dtype

    def index(self, i):
        return Shared(self.array[int(i)])

    def reshape(self, shape):
        return Shared(self.array.reshape(shape))

    def slice(self, start, length, dim=0):
        return Shared(self.array[(slice(None),) * dim + (slice(start, start + length),)])

    def permute(self, order):
        return Shared(self.array.transpose(order))

    @property
    def shape(self):
        return self.array.shape

    def load(self, layout):
        return block(self.array)

    def store(self, value):
        self.array[...] = value


class Coroutines:
    """Threads of which one runs at a time, and says who is next."""

    def __init__(self, programs):
        """Of numbers of programs, and their partitions."""
        self.changed, self.error = threading.Condition(), None
        partitions = [p for _, all_of_one in programs for p in all_of_one]
        self.program = [number for number, all_of_one in programs for _ in all_of_one]
        self.last = [max(i for i, n in enumerate(self.program) if n == number) for number in self.program]
        self.ready, self.watching = collections.deque(range(len(partitions))), []
        self.alive, self.running = len(partitions), None
        self.threads = [threading.Thread(target=self.run, args=(i, *p), daemon=True) for i, p in enumerate(partitions)]

    def run(self, me, function, arguments):
        here.me, here.coroutines, here.program = me, self, self.program[me]
        here.pending, here.copies, here.additions, here.unseen = [], [], [], []
        try:
            self.resume()
            with np.errstate(all="ignore"):
                function(*arguments)
            assert not here.pending, "products that nobody waited for"
            assert not here.additions, "additions that nobody waited for"
            complete()
        except BaseException as error:
            self.error = self.error or error
        self.alive -= 1
        self.hand_over()

    def hand_over(self):
        with self.changed:
            if not self.ready and self.alive and not self.error:
                self.error = AssertionError("all warps wait in vain")
            self.running = self.ready.popleft() if self.ready else None
            self.changed.notify_all()

    def resume(self):
        with self.changed:
            self.changed.wait_for(lambda: self.running == here.me or self.error)
        if self.error:
            raise self.error

    def finish(self):
        for t in self.threads:
            t.start()
        self.hand_over()
        for t in self.threads:
            t.join()
        if self.error:
            raise self.error


here = threading.local()  # this coroutine: its number, all of them, products and copies that nobody has waited for yet


class Barrier:
    """A phase is over when all have arrived and all announced bytes are there."""

    def __init__(self):
        self.phase, self.count, self.missing, self.bytes = 0, None, None, 0
        self.waiting, self.copies = [], []

    def init(self, count):
        self.count = self.missing = count

    def update(self, arrivals=0, announced=0):
        self.missing -= arrivals
        self.bytes += announced
        assert self.missing >= 0, "more arrived at a barrier than it counts"
        if not self.missing and not self.bytes:
            self.phase, self.missing = self.phase + 1, self.count
            woken, self.waiting = self.waiting, []
            producer = here.coroutines.last[here.me] if woken else None
            if producer in woken and not place.late:
                here.coroutines.ready.extendleft([here.me, producer])
                here.coroutines.hand_over()
                here.coroutines.resume()
                woken.remove(producer)
            if woken:
                here.coroutines.ready.extend(woken)

    def wait(self, parity):
        while self.copies:
            self.copies.pop(0)()
        while self.phase % 2 == int(parity):
            self.waiting.append(here.me)
            here.coroutines.hand_over()
            here.coroutines.resume()


class Barriers:
    def __init__(self, count):
        self.all = [Barrier() for _ in range(count)]

    def index(self, i):
        return self.all[int(i)]


class Descriptor:
    """An array in blocks, zeros outside: of `Rows` [B, H, L, D] of an array [B, L, H, D]."""

    def __init__(self, of):
        self.array = np.asarray(of.array)
        if isinstance(of, Rows):
            self.array = self.array.transpose(0, 2, 1, 3)
        self.dtype, self.layout = self.array.dtype, None
        self.block_type = types.SimpleNamespace(shape=of.block, nbytes=int(np.prod(of.block)) * self.dtype.itemsize)

    def there(self, at):
        return self.array[tuple(slice(int(i), int(i) + n) for i, n in zip(at, self.block_type.shape, strict=True))]

    def copy(self, at, bar, target):
        def arrive():
            there = self.there(at)
            target.array[...] = 0
            target.array[tuple(map(slice, there.shape))] = there
            bar.update(announced=-self.block_type.nbytes)

        if place.late and not bar.waiting:
            bar.copies.append(arrive)
        else:
            arrive()

    def add(self, at, source):
        """What is in the source when somebody waits until it has been read; it is there when somebody waits for that, or at
        the end."""
        there, where = self.there(at), (self, *map(int, at))
        assert there.shape == source.array.shape

        def read():
            value = source.array.copy()

            def finish():
                there[...] += value
                place.added.setdefault(where, []).append(here.program)

            here.unseen.append(finish)

        here.additions.append(read)


def store_wait(count):
    while len(here.additions) > count:
        here.additions.pop(0)()


def complete():
    store_wait(0)
    while here.unseen:
        here.unseen.pop(0)()


def count_of_blocks(text, count, number, seen=None):
    """How many have added, for some to wait for: `one_pass.py`."""
    if "red." in text:
        if "wait_group 0" in text:
            complete()
        assert not here.additions + here.unseen, "what is not there yet is counted"
        store(count, load(count) + 1)
        here.coroutines.ready.extend(here.coroutines.watching)
        here.coroutines.watching = []
    elif seen is not None and (seen < number).any():
        while (load(count) < number).any():
            here.coroutines.watching.append(here.me)
            here.coroutines.hand_over()
            here.coroutines.resume()
    if seen is not None:
        assert (load(count) == number).all(), "another number of blocks has added"
    return load(count)


def copy_async(target, pointer, mask):
    here.copies.append(lambda: target.store(load(pointer, mask)))


def arrive_with_copies(bar, increment_count):
    """When all copies of the coroutine so far have arrived."""
    assert not increment_count
    copies, here.copies = here.copies, []

    def arrive():
        for copy in copies:
            copy()
        bar.update(arrivals=32)

    if place.late and not bar.waiting:
        bar.copies.append(arrive)
    else:
        arrive()


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    assert is_async
    result = block(np.full(acc.shape, np.nan, np.float32))

    def finish():
        left, right = (np.asarray(x.array if isinstance(x, Shared) else x, np.float32) for x in (a, b))
        result[...] = left @ right + (np.asarray(acc) if use_acc else 0)

    here.pending.append(finish)
    return result


def warpgroup_mma_wait(count, deps):
    while len(here.pending) > count:
        here.pending.pop(0)()
    return deps[0] if len(deps) == 1 else tuple(deps)


def warp_specialize(partitions, workers, registers):
    assert len(partitions) == len(workers) + 1 == len(registers) + 1
    if place.gathered is None:
        Coroutines([(place.program, partitions)]).finish()
    else:
        place.gathered.append((place.program, partitions))


def reduced(function):
    return lambda a, axis: block(function(np.asarray(a), axis))


def elementwise(function):
    """Numbers of Python have no type of their own."""
    return lambda *args: block(function(*(a if isinstance(a, int | float) else np.asarray(a) for a in args)))


def inline_asm_elementwise(text, constraints, args, dtype, is_pure, pack):
    """Of the texts that the kernels have: they multiply, put two numbers of 16 bits together and apart, write and look for
    flags."""
    if "mul.f32" in text:
        return block(args[0] * args[1])
    if "cvt.rn" in text:
        low, high = (
            a.to(jnp.bfloat16 if "bf16x2" in text else np.float16).view(np.uint16).astype(np.uint32) for a in args
        )
        return block((high << 16 | low).view(np.int32))
    if "mov.b32 {" in text:
        return block((args[0] >> (0 if "{$0" in text else 16)).astype(np.uint16).view(np.int16))
    if "global.u32" in text or "red.relaxed" in text:
        return count_of_blocks(text, *args)
    flags, *numbers = args
    if numbers:  # of a counter, with its flag in front, both as floats
        if "atom" in text:
            assert (load(flags) == 1).all(), "a program takes numbers of no counter"
            number = load(flags + 2)
            store(flags + 2, number + 1)
            store(flags, np.where(number == numbers[0], 0, 1))
            return block(number.astype(np.int32))
        store(flags + 2, numbers[0])
        return store(flags, 1)
    if "ld.acquire" in text:
        assert (load(flags) == 1).all(), "a program waits in vain for a part"
    else:
        assert "st.release" in text
    store(flags, "st.release" in text)


def static_assert(condition, message=""):
    assert condition, message


place = types.SimpleNamespace(program=0, programs=1, late=False, gathered=None, added=None)


def allocate(dtype, shape, layout):
    if layout == "barriers":
        return Barriers(shape[0])
    return Shared(np.full(shape, np.nan, dtype))


language = types.ModuleType("triton.experimental.gluon.language")
vars(language).update(
    constexpr=lambda value: value, static_range=range, static_assert=static_assert,
    float32=np.dtype(np.float32), int16=np.dtype(np.int16), int32=np.dtype(np.int32), int64=np.dtype(np.int64),
    int8=np.dtype(np.int8), bfloat16=np.dtype(jnp.bfloat16), inline_asm_elementwise=inline_asm_elementwise,
    broadcast=np.broadcast_arrays, join=lambda a, b: np.stack([a, b], -1).view(Block),
    program_id=lambda axis: block(getattr(here, "program", place.program)), num_programs=lambda axis: block(place.programs),
    cdiv=lambda a, b: -(-a // b), allocate_shared_memory=allocate,
    load=load, store=store, expand_dims=lambda a, axis: np.expand_dims(a, axis).view(Block),
    arange=lambda start, end, layout=None: block(np.arange(start, end)),
    zeros=lambda shape, dtype, layout=None: block(np.zeros(shape, dtype)), zeros_like=lambda a: block(np.zeros_like(a)),
    full=lambda shape, value, dtype, layout=None: block(np.full(shape, value, dtype)),
    where=elementwise(np.where), maximum=elementwise(np.maximum), minimum=elementwise(np.minimum), abs=elementwise(np.abs),
    exp2=elementwise(lambda a: np.exp2(a, dtype=np.float32)), log2=elementwise(lambda a: np.log2(a, dtype=np.float32)),
    max=reduced(np.max), sum=reduced(np.sum), warp_specialize=warp_specialize,
    convert_layout=lambda a, layout, assert_trivial=False: a,
    **{
        name: lambda *args, **named: None
        for name in (
            "NVMMASharedLayout", "NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "SwizzledSharedLayout",
            "BlockedLayout", "DistributedLinearLayout",
        )
    },
)  # fmt: skip
hopper = types.ModuleType("triton.experimental.gluon.language.nvidia.hopper")
vars(hopper).update(
    mbarrier=types.SimpleNamespace(
        MBarrierLayout=lambda: "barriers",
        init=lambda bar, count: bar.init(count),
        wait=lambda bar, parity: bar.wait(parity),
        arrive=lambda bar, count, pred=True: bar.update(arrivals=count) if pred else None,
        expect=lambda bar, size: bar.update(arrivals=1, announced=size),
    ),
    tma=types.SimpleNamespace(
        async_load=lambda descriptor, at, bar, target: descriptor.copy(at, bar, target),
        async_atomic_add=lambda descriptor, at, source: descriptor.add(at, source),
        store_wait=store_wait,
    ),
    warpgroup_mma=warpgroup_mma,
    warpgroup_mma_wait=warpgroup_mma_wait,
    fence_async_shared=lambda: None,
)
ampere = types.ModuleType("triton.experimental.gluon.language.nvidia.ampere")
ampere.async_copy = types.SimpleNamespace(async_load=copy_async, mbarrier_arrive=arrive_with_copies)


def jit(function=None, **_):
    """Functions of the portable kernels, which some share, have Triton for their language."""
    if function is None or "tl" not in function.__globals__:
        return function or jit
    named = {name: getattr(value, "value", value) for name, value in function.__globals__.items()}
    return types.FunctionType(function.__code__, named | {"tl": language})


gluon = types.ModuleType("triton.experimental.gluon")
vars(gluon).update(jit=jit, language=language)
experimental = types.ModuleType("triton.experimental")
experimental.gluon = gluon


@contextlib.contextmanager
def _standing_in(modules):
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    with pytest.MonkeyPatch.context() as patch:
        for name in modules:  # what `from package import module` finds
            package, _, module = name.rpartition(".")
            if package == PACKAGE:
                patch.setattr(sys.modules[package], module, modules[name], raising=False)
        try:
            yield
        finally:
            for name, module in before.items():
                sys.modules.pop(name)
                if module is not None:
                    sys.modules[name] = module


@functools.cache
def emulated(old="", new=""):
    """The modules of the kernels by name, with that change in their source."""
    modules, found = {m.__name__: m for m in (experimental, gluon, language, ampere, hopper)}, False
    for name in MODULES:
        spec = importlib.util.find_spec(f"{PACKAGE}.{name}")
        source = spec.loader.get_source(spec.name)
        if old in source:
            with contextlib.suppress(LookupError):
                source, found = mutants.broken(source, old, new), True
        module = importlib.util.module_from_spec(spec)
        with _standing_in(modules):
            exec(compile(source, spec.origin, "exec"), vars(module))
        modules[spec.name] = module
    if old and not found:
        raise LookupError(f"no kernel is broken, since none has {old!r} in its code: name what stands there now")
    return modules


class Launcher:
    """Arrays are numpy's.  The kernels of Triton run through its own interpreter.  So few multiprocessors that a program computes
    several blocks."""

    target, descriptors = 90, True

    def __init__(self, *change, late=False, multiprocessors=2, together=None):
        self.modules, self.late, self.multiprocessors = emulated(*change), late, multiprocessors
        self.launched = set()  # names and features of kernels, and so many programs
        self.together = together  # the name of a kernel
        self.added = {}  # by descriptor and place, the programs that have had TMA add there

    def strides(self, array):
        return tuple(s // array.itemsize for s in array.strides)

    def round_to_tf32(self, array):
        return array

    def padded(self, array, n):
        return np.pad(array, [(0, 0)] * 3 + [(0, n)])

    def summed(self, array, by_column, shape, dtype):
        raise NotImplementedError

    def launch(self, launch):
        kernel, grid, constants = launch.kernel, launch.programs, launch.constants
        self.launched.add((kernel.fn.__name__, constants.get("FEATURES", Features()), grid))
        results = [np.full(o.shape, interpret.unwritten(o.dtype), jnp.dtype(o.dtype)) for o in launch.allocations()]
        named = launch.results(results)
        if not kernel.fn.__module__.startswith(PACKAGE):
            arrays = [np.ascontiguousarray(a) for a in launch.arrays()]
            interpret.launch(kernel, (grid,), *arrays, *launch.numbers(), *results, **constants)
            return named
        function = getattr(self.modules[kernel.fn.__module__], kernel.fn.__name__)
        described = lambda a: None if a.array is None else Descriptor(a)
        given = {
            name: described(a) if isinstance(a, DESCRIBED) else Pointer(np.empty(0) if a is None else a)
            for name, a in launch.inputs.items()
        }
        given |= {name: block(s) if isinstance(s, int) else np.float32(s) for name, s in launch.scalars.items()}
        written = {name: a.of if isinstance(a, InPlace) else a for name, a in launch.written(results).items()}
        given |= {name: described(a) if isinstance(a, DESCRIBED) else Pointer(a) for name, a in written.items()}
        place.late, place.programs, place.added = self.late, grid, self.added
        together = kernel.fn.__name__ == self.together
        place.gathered = [] if together else None
        with np.errstate(all="ignore"):
            for place.program in reversed(range(grid)) if together else range(grid):
                function(**given, **constants)
            if together:
                Coroutines(place.gathered).finish()
        if constants.get("FEATURES", Features()).dynamic:
            assert named["EXCHANGE"][0] == 0, "a counter has not ended"
        return named
