"""Finds the user's own line and module for an operation that is running, or that made an autograd node.

Reads stack frames and the tracebacks that anomaly mode stores; changes nothing.
"""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

_HERE = Path(__file__).resolve().parent
# Installed, utils/ lies within the package; in a checkout beside it, and a checkout may be called safe_trainer as well.
_ENGINE = _HERE.parent if (_HERE.parent / "__init__.py").is_file() else _HERE.parent / "safe_trainer"
_TORCH = Path(torch.__file__).resolve().parent
_PACKAGES = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib"))
_STANDARD = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))
_ENTRY = re.compile(r'File "(?P<path>.+)", line (?P<line>\d+), in (?P<function>\S+)')


@dataclass(frozen=True)
class Place:
    """One line of source text."""

    path: str
    line: int
    function: str

    def __str__(self) -> str:
        """Short form for messages: `model.py:42`."""
        return f"{Path(self.path).name}:{self.line}"

    @property
    def code(self) -> str:
        """The text of the line, empty if its file cannot be read."""
        return linecache.getline(self.path, self.line).strip()


@dataclass(frozen=True)
class Stack:
    """What the running Python stack says about one operation."""

    place: Place | None = None
    """Innermost line of the user's, inside the current forward or inside the current custom backward."""
    applied: Place | None = None
    """Where the user applied the custom `autograd.Function` whose forward is running."""
    module: str | None = None
    """Dotted name of the innermost module that is running, None outside or for the model as a whole."""
    caller: Place | None = None
    """Line that called backward; only known while a backward pass runs in the calling thread."""
    in_engine: bool = False
    """Whether a backward pass runs."""
    recomputed: bool = False
    """Whether an activation checkpoint runs its forward again inside that backward pass."""


@lru_cache(maxsize=4096)
def owner(path: str) -> str:
    """Whose file it is: 'user', 'library' (site-packages), 'torch' or 'own' (this package, recipes excepted).

    The standard library and generated code count as 'torch': no line in there tells a user anything.
    """
    if path.startswith("<"):
        return "user" if path in ("<stdin>", "<string>", "<console>") else "torch"
    resolved = Path(path).resolve()
    if resolved.is_relative_to(_TORCH):
        return "torch"
    if resolved.is_relative_to(_HERE):
        return "own"
    if resolved.is_relative_to(_ENGINE):
        return "user" if resolved.is_relative_to(_ENGINE / "recipes") else "own"
    if any(resolved.is_relative_to(folder) for folder in _PACKAGES):
        return "library"
    return "torch" if any(resolved.is_relative_to(folder) for folder in _STANDARD) else "user"


def choose(places: Iterable[Place]) -> Place | None:
    """The user's innermost line of `places` (innermost first); a library's only where no line is the user's."""
    fallback: Place | None = None
    for place in places:
        whose = owner(place.path)
        if whose == "user":
            return place
        if whose == "library" and fallback is None:
            fallback = place
    return fallback


@lru_cache(maxsize=4096)
def _role(code: CodeType) -> str:
    """Part that a frame plays for the tracer; the names are torch's own and the tests would notice a change."""
    path, name = code.co_filename.replace("\\", "/"), code.co_name
    if name == "_engine_run_backward" and path.endswith("torch/autograd/graph.py"):
        return "engine"
    if name == "_call_impl" and path.endswith("torch/nn/modules/module.py"):
        return "module"
    if path.endswith("torch/utils/checkpoint.py"):
        return "checkpoint"
    if path.endswith("torch/autograd/function.py") and name == "apply":
        return "function"
    return owner(code.co_filename)


def read_stack(name_of: Callable[[nn.Module], str | None], bottom: CodeType) -> Stack:
    """Read the stack of the operation now running, from the inside out as far as the frame of `bottom`.

    `name_of` gives a module's dotted name, None for one that is no part of the model.
    """
    places: list[Place] = []
    before_apply: int | None = None
    module: str | None = None
    recomputed = False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not bottom:
        role = _role(frame.f_code)
        if role == "engine":
            return Stack(choose(places), None, module, _caller(frame, bottom), True, recomputed)
        if role == "module" and module is None:
            module = name_of(frame.f_locals["self"])
        elif role == "checkpoint":
            recomputed = True
        elif role == "function" and before_apply is None:
            before_apply = len(places)
        elif role in ("user", "library"):
            places.append(Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    applied = choose(places[before_apply:]) if before_apply else None
    return Stack(choose(places), applied, module or None)


def _caller(frame: FrameType, bottom: CodeType) -> Place | None:
    outer: FrameType | None = frame
    while outer is not None and outer.f_code is not bottom:
        if owner(outer.f_code.co_filename) == "user":
            return Place(outer.f_code.co_filename, outer.f_lineno, outer.f_code.co_name)
        outer = outer.f_back
    return None


def calls(function: str, depth: int = 12) -> bool:
    """Whether a function of this name is among the innermost `depth` frames."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(depth):
        if frame is None:
            return False
        if frame.f_code.co_name == function:
            return True
        frame = frame.f_back
    return False


def trace_node(node: Any, bottom: CodeType) -> tuple[Any, Place | None]:
    """The forward node that an autograd node belongs to, and the user's line that made it, as anomaly mode noted it.

    A node made inside a backward pass leads back to the node it was made for (double backward), unless it was the
    user's own code that ran in there (a checkpoint's second forward, a custom backward).
    """
    for _ in range(8):  # as deep as anyone differentiates; a chain of parents cannot then run on for ever
        places = parse_traceback(node.metadata.get("traceback_", ()), bottom)
        parent = node.metadata.get("parent_")
        if parent is None:
            break
        engines = [i for i, place in enumerate(places) if place.function == "_engine_run_backward"]
        inside = choose(reversed(places[engines[-1] :])) if engines else None
        if inside is not None:
            return node, inside
        node = parent
    return node, choose(reversed(places))


def parse_traceback(entries: Iterable[str], bottom: CodeType | None = None) -> list[Place]:
    """Places of a traceback given as text, outermost first; what lies outside the frame of `bottom` is dropped."""
    places: list[Place] = []
    for match in _ENTRY.finditer("\n".join(entries)):
        place = Place(match["path"], int(match["line"]), match["function"])
        if bottom is not None and place.path == bottom.co_filename and place.function == bottom.co_name:
            places.clear()
        places.append(place)
    return places
