"""Exceptions of Shardwright, and helpers for their messages.

The first line of a message says what is wrong and where; the second line, if any, what to do.
"""

import contextlib
import errno
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAX_MESSAGE = 2_000
"""Maximum number of characters of a message: about one screen of a terminal."""

_OMISSION = "… and more"


class ShardwrightError(Exception):
    """Base class of all errors that Shardwright raises, except `CommunicationError`.

    `str(error)` has at most 2,000 characters and no control characters; `error.args[0]` is the full
    message.
    """

    def __str__(self) -> str:
        return printable(_shorten_message(super().__str__()))


_UNPRINTABLE = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\U000110bd\U000110cd"
    "\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f]"
)
"""Characters of the Unicode categories Cc (but tab and newline), Cf, Cs, Zl and Zp: a terminal
executes them, changes the order of the text, or does not show them."""

# Inserted at the beginning of the character class.
_UNPRINTABLE_IN_LINE = re.compile(_UNPRINTABLE.pattern.replace("[", "[\t\n", 1))
"""Unprintable characters, tab and newline, which a text of one line must not contain."""


def printable(text: str, lines: bool = True) -> str:
    r"""Escape control characters, so that a name in a file cannot control the terminal.

    The escapes are those of JSON, so that printed JSON keeps its meaning.

    Args:
        text: text to print.
        lines: whether the text may have several lines and tabs.

    >>> printable("net\x1b[2J.first")
    'net\\u001b[2J.first'
    """
    return (_UNPRINTABLE if lines else _UNPRINTABLE_IN_LINE).sub(_escape_character, text)


# Cc, Cs, Zl and Zp. Others, such as the joiners of Persian and Hindi words, are parts of names.
_CONTROL = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def has_control_characters(name: str) -> bool:
    r"""Return whether a name ends a line, controls a terminal, or cannot be encoded as UTF-8.

    Models and files with such names are refused: a line break would forge a line of a message, a
    table or a program.

    >>> has_control_characters("net\nerror: forged"), has_control_characters("\ud800")
    (True, True)
    """
    # ASCII first, a fast test that most names pass.
    return not (name.isascii() and name.isprintable()) and _CONTROL.search(name) is not None


def _escape_character(match: re.Match[str]) -> str:
    # In UTF-16, as JSON escapes characters beyond U+FFFF as a surrogate pair.
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def _shorten_message(message: str, limit: int = MAX_MESSAGE) -> str:
    """Shorten a message to `limit` characters, keeping the ends of both problem and remedy.

    >>> message = "no such keys: a1, a2, a3, a4, a5, a6, a7, a8, a9\\nremove them"
    >>> print(_shorten_message(message, 56))
    no such keys: a1, … and more, a7, a8, a9
    remove them
    """
    if len(message) <= limit:
        return message
    problem, newline, remedy = message.partition("\n")
    # Only a message of two lines is a problem and a remedy.
    if not newline or "\n" in remedy:
        return _omit_middle(message, limit)
    # At most half, so that a long remedy does not displace the problem.
    remedy = _omit_middle(remedy, limit // 2)
    return f"{_omit_middle(problem, limit - 1 - len(remedy))}\n{remedy}"


def _omit_middle(text: str, limit: int) -> str:
    """Shorten a text to `limit` characters by omitting its middle.

    The gap begins and ends between list items or lines where possible.
    """
    if len(text) <= limit:
        return text
    end = limit // 3
    head, tail = text[: limit - end - len(_OMISSION) - 1], text[-end:]
    # The gap begins or ends inside a word if the nearest separator is too far away.
    first, last = len(head) // 2, len(tail) // 2
    # `rfind` returns -1 without a separator, so a start of 0 or 1 means none.
    start = max(head.rfind("\n", first) + 1, head.rfind(", ", first) + 2)
    start = start if start > 1 else head.rfind(" ", first) + 1
    stops = [stop for separator in ("\n", ", ") if (stop := tail.find(separator, 0, last)) >= 0]
    stop = min(stops, default=tail.find(" ", 0, last))
    return (head[:start] or head) + _OMISSION + tail[max(stop, 0) :]


class ShardwrightWarning(UserWarning):
    """Base class of warnings about files and checkpoints.

    `str(warning)` has no control characters; `warning.args[0]` is the full message.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class LayoutError(ShardwrightError, ValueError):
    """An invalid layout: unknown or repeated axes, or a dimension that is not divisible."""


class StrategyError(ShardwrightError, ValueError):
    """An invalid sharding strategy: sizes that are not divisible, or too many shards."""


class CaptureError(ShardwrightError):
    """A model that cannot be captured; the message gives the user's line and what to change."""


class PlanError(ShardwrightError):
    """A plan that cannot be used, for example because it is for another model or another number of
    devices, or has an unsupported version."""


# Also a RuntimeError, which PyTorch itself raises for mixed tensors.
class MixedTensorsError(PlanError, RuntimeError):
    """An operator that mixes an ordinary tensor with a parameter of a planned model, which is a
    DTensor."""


class ConfigError(ShardwrightError, ValueError):
    """A configuration file with a value of the wrong type, an unknown key, or conflicting keys."""


class DataError(ShardwrightError):
    """Training data that is missing or malformed."""


class NonFiniteError(ShardwrightError):
    """A non-finite loss, gradient or parameter; the message names the step and the operator."""


class CheckpointError(ShardwrightError):
    """A checkpoint that is missing, belongs to another model, or has an unsupported version."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint with a damaged, truncated or missing file; the message names the file."""


class LockError(ShardwrightError):
    """A folder that another run has locked for writing; the message names the process."""


class DeferredError(ShardwrightError):
    """A tensor created inside `no_init_parameters` that is used before it is initialized, or that
    cannot be initialized."""


# A RuntimeError, like PyTorch's errors of collectives: its cause is on another rank.
class CommunicationError(RuntimeError):
    """A collective that failed because another rank has ended or did not join in time."""


class IndivisibleError(StrategyError):
    """A model without a dimension that is divisible by the number of devices."""


class MixedSamplesError(StrategyError):
    """A loss that is neither the sum nor the mean of the losses of its micro-batches."""


class MemoryLimitError(ShardwrightError):
    """A model that does not fit into the memory of its devices under any plan.

    Args:
        needed: smallest sufficient memory limit in bytes per device.
    """

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


# A KeyboardInterrupt, so that callers that do not handle it stop as at any Ctrl-C.
class PlanInterrupted(KeyboardInterrupt):
    """Ctrl-C during a search with a memory limit, after the search found a plan that fits.

    Args:
        plan: function that returns the fastest fitting plan found so far.
        candidate: the planner's candidate for this plan.
    """

    def __init__(self, plan: Callable[[], Any], candidate: Any = None) -> None:
        super().__init__()
        self.plan, self.candidate = plan, candidate


_SYSTEM_REMEDIES = {
    errno.ENOSPC: "free some space, or use another disk",
    errno.EDQUOT: "free some space, or use another disk",
    errno.EFBIG: "raise the limit of file sizes, for example: ulimit -f unlimited",
    errno.EMFILE: "raise the limit of open files, for example: ulimit -n 4096",
    errno.ENFILE: "close other programs: all open files of the machine are in use",
    errno.EAGAIN: "raise the limit of processes, for example: ulimit -u 4096",
    errno.ENOMEM: "free some memory, or use fewer processes",
}
"""Remedies for limits of the system, such as a full disk, by error number."""


def system_remedy(error: OSError) -> str:
    """Return the remedy for a limit of the system, such as a full disk; empty for other errors.

    Python often does not name the file of these errors.
    """
    # A full pipe also raises EAGAIN, which says nothing about processes.
    if hasattr(error, "characters_written"):
        return ""
    return _SYSTEM_REMEDIES.get(error.errno or 0, "")


def one_line(error: BaseException) -> str:
    """Join the lines of an error's message by `; `, for a table."""
    return "; ".join(str(error).splitlines())


def with_note(error: BaseException, note: str) -> str:
    """Return the message of an error, with `note` appended to its first line."""
    problem, newline, remedy = str(error).partition("\n")
    return f"{problem}{note}{newline}{remedy}"


@contextmanager
def needs_extra(name: str, purpose: str, error_type: type[ShardwrightError]) -> Iterator[None]:
    """Context that re-raises a failed import as an error that names the extra to install.

    Args:
        name: extra of this package that installs the imported library.
        purpose: the start of the message, such as "a report needs `jinja2`".
        error_type: class of the error.

    Raises:
        error_type: if an import in the block fails.
    """
    try:
        yield
    except ImportError as error:
        # From the import error, whose traceback shows which import failed.
        raise error_type(f"{purpose} ({error})\npip install 'shardwright[{name}]'") from error


def warn_user(message: str, category: type[Warning] = ShardwrightWarning) -> None:
    """Issue a warning at the line of the user's code that has called this package."""
    # As `skip_file_prefixes` of `warnings.warn` does, which Python 3.11 lacks.
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED_FILES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


_SKIPPED_FILES = (str(Path(__file__).parent) + os.sep, contextlib.__file__)
"""Files of this package, and the module whose functions call those that are context managers."""
