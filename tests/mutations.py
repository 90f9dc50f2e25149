"""Mutations of text files: what slips, tools and attackers do to a configuration or a plan."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import yaml

VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        7,
        2**31,
        2**61 - 1,
        2**63,
        -(2**63),
        10**15,
        2**64,
        10**4400,
    ),
    *(0.0, -0.0, 0.5, 1e-320, 1e308, -1e300, float("nan"), float("inf"), -float("inf")),
    *("", "x", "auto", "None", "1", "-5", "\u0000", "é☃", "\ud800", "a" * 10_000, "../..", "/"),
    *("os:system", "torch:float32", "[red]", "%s{}", "1e999 PB", "float32", "grad", "\x1b[31m"),
    *([], {}, [[]], [None], {"": None}, {"a": {"b": []}}, [1, "a"], [-1], [2**62, 2**62], [0]),
)
DEEP = 1200
"""More than Python's stack; YAML takes time with the square of it."""
RAW = (
    *("[" * DEEP, "{" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "[" * DEEP + "]" * DEEP),
    *("9" * 5000, "0x" + "f" * 5000, "-" + "9" * 5000 + ".5", "1e99999", ".nan", "-.inf", "NaN"),
    *("Infinity", "!!python/object/apply:os.system [ls]", "!!binary x", "!!timestamp x", "!x y"),
    *("!!int x", "!!float x", "!!bool x", "!!set {a}", "!!omap x", "!!null x", "!!str [a]"),
    *("2001-99-99", "2001-01-01", "0b_", "0x_", "1:99:99", "&a [*a]", "&a {b: *a}", "*missing"),
    *("<<: *a", "? [a, b]\n: c", "{[1, 2]: 3}", "{{a: b}: c}", "? {a: b}\n: c", "=", "<<: [1]"),
    *('"\\ud800"', '"\\U00110000"', "\ufeff", "\x00", "\t", "---\n", "...\n", "%YAML 9.9\n---\n"),
    *("|\n  x", ">-\n", "'", '"', "# x", "- ", ": ", "\u2028", "\x85"),
)
ALIASES = "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else '1, 1, 1, 1, 1, 1, 1, 1, 1'}]\n"
    for n in range(12)
)
MERGES = "m0: &m0 {a: 1}\n" + "".join(
    f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}], b{n}: 1}}\n" for n in range(1, 12)
)
CYCLE = "a: &a\n  <<: *a\n"

_SCALAR = re.compile(r"[:\[,]\s*([^\s\[\]{},][^\n,\[\]{}]*)")


def mutated(content: bytes, seed: int, dump: Callable[[Any], str]) -> bytes:
    """One to three mutations of a file, the same for equal seeds.

    Args:
        dump: writes the plain data of such a file.
    """
    draw = random.Random(seed)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        (kind,) = draw.choices((_values, _lines, _bytes, _whole, _raw), (8, 1, 1, 1, 1))
        content = kind(content, draw, dump)
    return content


def json_text(data: Any) -> str:
    return json.dumps(data, indent=1)


def yaml_text(data: Any) -> str:
    return yaml.safe_dump(data, sort_keys=False)


def _values(content: bytes, draw: random.Random, dump: Callable[[Any], str]) -> bytes:
    """One value of the file is replaced, removed, moved, nested, or given another key."""
    if b"<<" in content or b"*a" in content:
        return content  # PyYAML itself would expand what is merged.
    try:
        data = yaml.safe_load(content) if dump is yaml_text else json.loads(content)
        places = list(_places(data))
        if not places:
            return content
        owner, key = draw.choice(places)
        change = draw.randrange(7)
        if change == 0:
            del owner[key]
        elif change == 1 and isinstance(owner, dict):
            owner[draw.choice(("", "x", "version", "name", "é", "\ud800", "a" * 500))] = owner[key]
        elif change == 2:
            other, at = draw.choice(places)
            owner[key] = other[at]
        elif change == 3:
            owner[key] = [owner[key]] if draw.random() < 0.5 else {"x": owner[key]}
        elif change == 4 and isinstance(owner[key], int | float):
            owner[key] = owner[key] * draw.choice((-1, 2, 3, 1000, 10**9, 0.5)) + draw.choice(
                (0, 1)
            )
        elif change == 5 and isinstance(owner[key], list):
            owner[key] = owner[key] * draw.choice((0, 2, 3)) + draw.choice(([], [0], [None]))
        else:
            owner[key] = draw.choice(VALUES)
        return dump(data).encode("utf-8", "surrogatepass")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return content[: len(content) // 2]
    except yaml.YAMLError:
        return content[: len(content) // 2]


def _places(data: Any) -> Any:
    """Each mapping or list with each of its keys or indices."""
    if isinstance(data, dict | list):
        for key in list(data) if isinstance(data, dict) else range(len(data)):
            yield data, key
            yield from _places(data[key])


def _lines(content: bytes, draw: random.Random, dump: Callable[[Any], str]) -> bytes:
    """Lines are repeated, removed, swapped or indented."""
    lines = content.split(b"\n")
    first, second = draw.randrange(len(lines)), draw.randrange(len(lines))
    change = draw.randrange(4)
    if change == 0:
        lines[first:first] = lines[min(first, second) : max(first, second) + 1]
    elif change == 1:
        del lines[first]
    elif change == 2:
        lines[first], lines[second] = lines[second], lines[first]
    else:
        lines[first] = b"  " + lines[first]
    return b"\n".join(lines)


def _bytes(content: bytes, draw: random.Random, dump: Callable[[Any], str]) -> bytes:
    """Bytes are flipped, removed or added."""
    changed = bytearray(content or b"x")
    for _ in range(draw.choice((1, 1, 4, 40))):
        place = draw.randrange(len(changed))
        change = draw.randrange(3)
        if change == 0:
            changed[place] ^= 1 << draw.randrange(8)
        elif change == 1:
            changed[place:place] = bytes([draw.randrange(256)])
        elif len(changed) > 1:
            del changed[place]
    return bytes(changed)


def _whole(content: bytes, draw: random.Random, dump: Callable[[Any], str]) -> bytes:
    """The file is cut, empty, doubled, in another encoding, or another file altogether."""
    text = content.decode("utf-8", "replace")
    choices: tuple[Callable[[], bytes], ...] = (
        lambda: content[: draw.randrange(len(content) + 1)],
        lambda: content[draw.randrange(len(content) + 1) :],
        lambda: b"",
        lambda: content + content,
        lambda: b"\xef\xbb\xbf" + content,
        lambda: text.encode("utf-16"),
        lambda: text.encode("latin-1", "replace") + b"\xe9",
        lambda: draw.randbytes(200),
        lambda: (ALIASES + text).encode(),
        lambda: (MERGES + text).encode(),
        lambda: (CYCLE + text).encode(),
        lambda: draw.choice(RAW).encode("utf-8", "surrogatepass"),
        lambda: dump(draw.choice(VALUES[:5])).encode(),
    )
    return draw.choice(choices)()


def _raw(content: bytes, draw: random.Random, dump: Callable[[Any], str]) -> bytes:
    """A piece of syntax takes the place of a scalar, or is put anywhere."""
    text = content.decode("utf-8", "replace")
    piece = draw.choice(RAW)
    scalars = [(m.start(1), m.end(1)) for m in _SCALAR.finditer(text)]
    if scalars and draw.random() < 0.8:
        start, end = draw.choice(scalars)
    else:
        start = end = draw.randrange(len(text) + 1)
    return (text[:start] + piece + text[end:]).encode("utf-8", "surrogatepass")
