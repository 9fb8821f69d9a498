"""Capture, restore, isolate and seed every random generator that training code draws from.

Touches the generators of torch (CPU, and each CUDA device once CUDA is initialised), Python's ``random`` and NumPy's
legacy global; never a generator that somebody made for himself, and it never initialises CUDA.

``Snapshot`` is for every step, ``capture`` and ``restore`` for checkpoints, ``isolated`` for code that must leave no
trace, ``seed_item`` for a data set whose randomness must depend on (seed, epoch, index) alone.

Measured on one core (torch 2.14, NumPy 2.4, CPython 3.11, microseconds):

=============================  =====  ==========================================================================
``Snapshot.take``, steady         2   1 torch, under 1 Python and NumPy: their words are unchanged since the last take
``Snapshot.take``, Python used   12   ``random.getstate`` alone is 10
``Snapshot.take``, NumPy used    56   ``numpy.random.get_state`` alone is 44
``Snapshot.restore``              7   4 Python, 2 NumPy, 0.3 torch (53 if NumPy holds a cached normal number)
``Snapshot()``                   60   the first take reads NumPy in full; ``isolated()`` adds a restore
``capture``, ``restore``    180, 77   for checkpoints: 625 numbers of Python become a tensor
``seed_item``                    11   6 Python, 2 NumPy, 1 torch, 1 the mix
``seed_everything``             180   ``torch.manual_seed`` also walks the accelerators
=============================  =====  ==========================================================================
"""

from __future__ import annotations

import ctypes
import platform
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MASK = 2**64 - 1
_KINDS = ("python", "numpy", "torch", "cuda")
_STATE_BYTES = 2500  # a Mersenne twister in C: 624 words of 32 bits, and the position among them as an int
_PYTHON = getattr(random.getstate, "__self__", None)  # the object behind the functions of `random`


class Snapshot:
    """The state of every generator at the last ``take``: one object, used again each step.

    ``take`` keeps references to what the generators hand out and copies nothing twice. It does not wait for a GPU: the
    state of a CUDA generator is a seed and an offset on the host.
    """

    def __init__(self) -> None:
        self._numpy_state: dict[str, Any] = {}
        self._numpy_words = b""
        self._memory: ctypes.Array[ctypes.c_char] | None = None
        self._bit_generator: Any = None
        self._python: Any = None
        self._python_words = b""
        self._python_memory: ctypes.Array[ctypes.c_char] | None = None
        self.take()

    def take(self) -> Snapshot:
        """Remember the present states; returns itself."""
        self._take_python()
        self._torch = torch.default_generator.get_state()
        self._cuda = _cuda_states()
        self._take_numpy()
        return self

    def restore(self) -> None:
        """Put the states of the last ``take`` back. Any number of times."""
        random.setstate(self._python)
        torch.default_generator.set_state(self._torch)
        for generator, state in zip(torch.cuda.default_generators, self._cuda, strict=False):
            generator.set_state(state)
        self._restore_numpy()

    def state(self) -> dict[str, Any]:
        """The snapshot as ``capture`` gives it: fit for ``torch.save``, independent of this object."""
        version, words, cached = self._python
        return {
            "python": {"version": version, "words": torch.tensor(words), "cached": cached},
            "numpy": _plain(self._numpy_state),
            "torch": self._torch.clone(),
            "cuda": [state.clone() for state in self._cuda],
        }

    def _take_python(self) -> None:
        """Read Python's generator, in full only if it moved.

        The full read makes 625 numbers and costs 10 us, comparing the generator's memory 0.3. As with NumPy, a cached
        normal number that goes or comes without a draw is asked for by itself.
        """
        if self._python_memory is not None and self._python[2] == getattr(_PYTHON, "gauss_next", None):
            words = self._python_memory.raw
            if words == self._python_words:
                return
            self._python_words = words
            self._python = random.getstate()
            return
        self._python = random.getstate()
        self._python_memory = _memory_of_python(self._python)
        self._python_words = self._python_memory.raw if self._python_memory is not None else b""

    def _take_numpy(self) -> None:
        """Read NumPy's generator, in full only if it moved.

        The full read costs 44 us, comparing the generator's memory 0.2. Equal memory means an equal state as long as
        no normal number is cached: one gets cached only by a draw, and a draw moves the memory. (The one way round
        this is a ``set_state`` to the very same words with a cached number added.)
        """
        generator = np.random.mtrand.get_bit_generator()
        if generator is self._bit_generator and self._memory is not None and not self._numpy_state["has_gauss"]:
            words = self._memory.raw
            if words == self._numpy_words:
                return
            self._numpy_words = words
            self._numpy_state = np.random.get_state(legacy=False)
            return
        self._bit_generator = generator
        self._numpy_state = np.random.get_state(legacy=False)
        self._memory = _memory_of(generator, self._numpy_state)
        self._numpy_words = self._memory.raw if self._memory is not None else b""

    def _restore_numpy(self) -> None:
        """Write the words back; ``numpy.random.seed`` first, since only it drops a cached normal number cheaply."""
        unmoved = np.random.mtrand.get_bit_generator() is self._bit_generator
        if self._memory is not None and unmoved and not self._numpy_state["has_gauss"]:
            np.random.seed(0)
            self._memory.raw = self._numpy_words
        else:
            np.random.set_state(self._numpy_state)


def capture() -> dict[str, Any]:
    """The state of every generator; ``torch.save`` it, and ``torch.load(weights_only=True)`` reads it.

    Keys: "python", "numpy", "torch", and "cuda", a list with an entry a device (empty while CUDA is not initialised).
    """
    return Snapshot().state()


def restore(state: Mapping[str, Any]) -> list[str]:
    """Put a captured state back; gives the names of generators that could not be restored, normally none.

    Those are CUDA devices that this machine lacks: ["cuda:1"]. ValueError if `state` is not what ``capture`` gives.
    Does not initialise CUDA: its states are set once CUDA starts.
    """
    missing = [kind for kind in _KINDS if kind not in state]
    if missing:
        raise ValueError(f"a captured state must have the keys {', '.join(_KINDS)} (missing: {', '.join(missing)})")
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["cached"]))
    np.random.set_state(_numpy_again(state["numpy"]))
    torch.default_generator.set_state(state["torch"].cpu())  # torch.load may have been told to map it away
    present = torch.cuda.device_count() if state["cuda"] else 0
    for index, device_state in enumerate(state["cuda"][:present]):
        torch.cuda.set_rng_state(device_state.cpu(), index)
    return [f"cuda:{index}" for index in range(present, len(state["cuda"]))]


@contextmanager
def isolated() -> Iterator[None]:
    """Whatever the body draws or seeds, every generator is afterwards as before, also if the body raises."""
    before = Snapshot()
    try:
        yield
    finally:
        before.restore()


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch on every device. `seed` is a whole number from 0 to 2**64 - 1.

    NumPy takes 32 bits: a smaller seed gives the numbers of ``numpy.random.seed(seed)``, a larger one two words.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= _MASK:
        raise ValueError(f"seed must be a whole number from 0 to 2**64 - 1 (got {seed!r})")
    random.seed(seed)
    np.random.seed(seed if seed < 2**32 else [seed & 0xFFFFFFFF, seed >> 32])
    torch.manual_seed(seed)


def item_seed(seed: int, epoch: int, index: int) -> int:
    """A number of 64 well mixed bits for sample `index` of epoch `epoch`: a pure function of the three.

    Each of the three goes through the finaliser of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
    number generators", 2014), so neighbouring samples, epochs and seeds share nothing.
    """
    return _mix(_mix(_mix(seed) + epoch) + index)


def seed_item(seed: int, epoch: int, index: int) -> None:
    """Start the CPU generators anew for one sample, so that its randomness depends on (seed, epoch, index) alone.

    Torch's and NumPy's twisters use 32 bits of a seed and the same start-up, hence other bits for each: with the same
    ones, ``torch.rand`` and ``numpy.random.rand`` would follow one stream. Accelerators are left alone.
    """
    bits = item_seed(seed, epoch, index)
    torch.default_generator.manual_seed(bits & 0xFFFFFFFF)
    np.random.seed(bits >> 32)
    random.seed(bits)


def _mix(number: int) -> int:
    """Splitmix64's step and finaliser: a bijection of 64 bits; each input bit flips about half of the output."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def _cuda_states() -> list[Tensor]:
    """A state for each device, or none as long as nothing has started CUDA."""
    if not torch.cuda.is_initialized():
        return []
    return [generator.get_state() for generator in torch.cuda.default_generators]


def _memory_of(generator: Any, state: Mapping[str, Any]) -> ctypes.Array[ctypes.c_char] | None:
    """NumPy's generator as memory, or None if it is not the twister that we know how to read.

    ``ctypes.state_address`` is NumPy's public way to it; that the words found there are the state's is checked.
    """
    if state["bit_generator"] != "MT19937":
        return None
    memory = (ctypes.c_char * _STATE_BYTES).from_address(generator.ctypes.state_address)
    words = np.frombuffer(memory.raw, dtype=np.uint32)
    same = np.array_equal(words[:624], state["state"]["key"]) and int(words[624]) == state["state"]["pos"]
    return memory if same else None


def _memory_of_python(state: tuple[Any, ...]) -> ctypes.Array[ctypes.c_char] | None:
    """The memory of Python's own generator, or None where it does not lie as in CPython: there an object's head is
    followed by the position in the words and the 624 words. That the numbers found there are the state's is checked.
    """
    if platform.python_implementation() != "CPython" or state[0] != 3 or not isinstance(_PYTHON, random.Random):
        return None
    if type(_PYTHON).__basicsize__ < object.__basicsize__ + _STATE_BYTES:
        return None
    memory = (ctypes.c_char * _STATE_BYTES).from_address(id(_PYTHON) + object.__basicsize__)
    words = np.frombuffer(memory.raw, dtype=np.uint32)
    return memory if (*words[1:].tolist(), int(words[0])) == state[1] else None


def _plain(value: Any) -> Any:
    """NumPy's state dictionary with tensors in place of arrays (int64: torch.load knows no numpy)."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "words": torch.from_numpy(value.astype(np.int64))}
    return value


def _numpy_again(value: Any) -> Any:
    """The inverse of `_plain`."""
    if isinstance(value, Mapping) and set(value) == {"dtype", "words"}:
        return value["words"].cpu().numpy().astype(value["dtype"])
    if isinstance(value, Mapping):
        return {key: _numpy_again(part) for key, part in value.items()}
    return value
