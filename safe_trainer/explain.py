"""Turns an error of PyTorch's, raised or pasted as text, into what happened, where, why, and what to do about it.

``explain(error)`` reads the message and the traceback; it runs nothing and changes nothing. What it knows stands in
``torch_messages``.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safe_trainer.torch_messages import ANY_OPERATION, CUSTOM_OPERATION, MESSAGES, OPERATIONS, Message
from safe_trainer.utils.source_lines import Place, choose


@dataclass(frozen=True)
class Explanation:
    """An error in plain words. ``str()`` of it is what a user reads."""

    title: str
    what: str
    where: str | None
    """The user's own line, `model.py:42`, with its text if that is known; None if the error does not show it."""
    cause: str
    remedy: str

    def __str__(self) -> str:
        place = f"  Where: {self.where}\n" if self.where else ""
        return f"{self.title}\n  What: {self.what}\n{place}  Why: {self.cause}\n  What to do: {self.remedy}"


@dataclass(frozen=True)
class Frame:
    """One line of a traceback as it stands in a text."""

    path: str
    line: int
    code: str

    def __str__(self) -> str:
        name = re.split(r"[\\/]", self.path)[-1]
        return f"{name}:{self.line}" + (f" ({self.code})" if self.code else "")

    @property
    def is_users(self) -> bool:
        """Whether it is neither torch's nor another library's nor ours. The file need not be on this machine."""
        path = self.path.replace("\\", "/")
        ours = Path(path).is_absolute() and Path(path).parent in (_HERE, _HERE.parent / "utils", _HERE / "utils")
        return not ours and re.search(r"site-packages|dist-packages|/lib/python3|<frozen|(^|/)torch/", path) is None


_HERE = Path(__file__).resolve().parent
_FRAME = re.compile(
    r'^[ \t>|]*(?:File "(?P<path>[^"\n]+)", line (?P<line>\d+)(?:, in [^\n]*)?'  # Python's own
    r"|File (?P<shell_path>[^\s:]+):(?P<shell_line>\d+), in [^\n]*"  # IPython's
    r"|(?P<cell>Cell In\[\d+\]), line (?P<cell_line>\d+)[^\n]*)"  # a notebook's
    r"(?:\n(?![ \t>|]*(?:File |Cell In))[ \t>|]+(?P<code>[^\s^~][^\n]*))?",
    re.MULTILINE,
)
_NAN = re.compile(r"Function '(?P<function>[^']+)' returned nan values in its (?P<place>\d+)th output")
_STATED = re.compile(r"forward is at (?P<place>\S+:\d+)")  # this and the next two stand in our own AnomalyError
_ORIGIN = re.compile(r"it became so in (?P<function>[\w:]+)")
_MODULE = re.compile(r"(module [^\s:]+)(?: got a finite|: it became so)")
_FORWARD = re.compile(
    r"Traceback of forward call that [^\n]*:[ \t]*\n(?P<frames>.*?)(?=\(Triggered internally|\n\S|\Z)", re.S
)


def explain(error: BaseException | str) -> Explanation:
    """What an error means. Never fails on a message it does not know: the explanation then says so.

    Args:
        error: an exception, or text that contains its message; best all that was printed, warnings included, since
            anomaly mode prints the forward line as a warning before the error.
    """
    if not isinstance(error, BaseException | str):
        raise TypeError(f"explain takes an exception or the text of one (got {type(error).__name__})")
    for text in _texts(error):
        if _NAN.search(text) or _ORIGIN.search(text):
            return _explain_nan(text, error)
        for message in MESSAGES:
            if found := re.search(message.pattern, text, re.IGNORECASE | re.DOTALL):
                return _filled(message, found, _where(text, error))
    return _unknown(error)


def _texts(error: BaseException | str) -> Iterator[str]:
    """The message, then those of the errors it came from."""
    if isinstance(error, str):
        yield error
        return
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        seen.append(following)
        yield f"{type(following).__name__}: {following}"
        following = following.__cause__ or following.__context__


def _explain_nan(text: str, error: BaseException | str) -> Explanation:
    """Anomaly mode's own error, or our AnomalyError, which knows better where it began."""
    origin, nan = _ORIGIN.search(text), _NAN.search(text)
    function = (origin or nan)["function"]  # type: ignore[index]  # one of the two was found
    name = re.sub(r"Backward\d*$", "", function)
    known = [operation for operation in OPERATIONS if re.fullmatch(operation.names, name)]
    operation = known[0] if known else CUSTOM_OPERATION if function.endswith("Backward") else ANY_OPERATION
    does = operation.does.format(name=name)
    if origin is None and nan is not None:
        made = f"computed a gradient that has NaN in it: that of the {_ordinal(int(nan['place']) + 1)} input of {does}"
    else:
        made = f"got a finite gradient and gave one that is not: the backward of {does}"
    module = _MODULE.search(text)
    forward = _forward_line(text)
    unseen = (
        " The forward line is not in this message: anomaly mode prints it as a warning before the error, provided that "
        "the forward ran under it, too."
    )
    return Explanation(
        title=f"{function} gave {'NaN' if nan else 'a gradient that is not finite'}",
        what=f"in the backward pass{f' of {module[1]}' if module else ''}, {function} {made}.",
        where=f"forward at {forward}" if forward else _where(text, error),
        cause=operation.cause.format(name=name),
        remedy=operation.remedy.format(name=name) + ("" if forward else unseen),
    )


def _forward_line(text: str) -> str | None:
    """The user's line that ran the forward of the operation, as far as the text has it."""
    if stated := _STATED.search(text):
        return stated["place"]
    section = _FORWARD.search(text)
    if section:
        return _deepest(_frames(section["frames"]))
    if "Traceback (most recent call last)" in text:
        return None  # these frames lead to backward(), not to the forward
    frames = [frame for frame in _frames(text) if frame.is_users]
    forward = [frame for frame in frames if "backward(" not in frame.code]
    backward_last = bool(frames) and frames[-1] not in forward
    return str(forward[0 if backward_last else -1]) if forward else None


def _where(text: str, error: BaseException | str) -> str | None:
    """The user's deepest line in a text, or else in an exception's traceback."""
    if stated := _STATED.search(text):
        return stated["place"]
    in_text = _deepest(_frames(text))
    if in_text or isinstance(error, str):
        return in_text
    frames = [Place(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    place = choose(reversed(frames))
    if place is None:
        return None
    return f"{place} ({place.code})" if place.code else str(place)


def _frames(text: str) -> list[Frame]:
    frames = []
    for found in _FRAME.finditer(text):
        path = found["path"] or found["shell_path"] or found["cell"]
        line = found["line"] or found["shell_line"] or found["cell_line"]
        frames.append(Frame(path, int(line), (found["code"] or "").strip()))
    return frames


def _deepest(frames: list[Frame]) -> str | None:
    users = [frame for frame in frames if frame.is_users]
    return str(users[-1]) if users else None


def _filled(message: Message, found: re.Match[str], where: str | None) -> Explanation:
    """The texts of a message with the words of the error in them."""
    words = {name: value or "" for name, value in found.groupdict().items()}

    def fill(text: str) -> str:
        kept = re.sub(r"\[\[(.*?)\]\]", lambda part: part[1] if _complete(part[1], words) else "", text)
        return kept.format(**words)

    return Explanation(fill(message.title), fill(message.what), where, fill(message.cause), fill(message.remedy))


def _complete(part: str, words: dict[str, str]) -> bool:
    return all(words[name] for name in re.findall(r"\{(\w+)\}", part))


def _unknown(error: BaseException | str) -> Explanation:
    text = error.strip() if isinstance(error, str) else f"{type(error).__name__}: {error}"
    lines = [line for line in text.splitlines() if line.strip()]
    return Explanation(
        title="Not a message that is known here",
        what=lines[-1].strip()[:300] if lines else "the text is empty.",
        where=_where(text, error),
        cause="unknown: this is none of the errors that can be explained from their text alone.",
        remedy=(
            "read the innermost line of your own in the traceback. On a GPU run once more with CUDA_LAUNCH_BLOCKING=1, "
            "for errors there surface late. If numbers are wrong rather than the program, run with "
            "anomaly_detection=true sample_rate=1, which names the operation."
        ),
    )


def _ordinal(number: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(number, f"{number}th")
