"""Equal blocks of a program as one function: which they are, and what stays outside."""

from __future__ import annotations

from shardwright.core.lower.emit import Line, write_body
from shardwright.core.lower.regions import find_regions


def line(name: str, function: str, *reads: str) -> Line:
    return Line((name,), f"{function}({', '.join(reads)})", reads)


def layers(*functions: str) -> list[Line]:
    """Residual layers of two lines each."""
    lines = [Line(("x",), "inputs[0]", ())]
    before = "x"
    for n, function in enumerate(functions):
        lines.append(Line((f"w{n}",), f"parameters['layers.{n}']", ()))
        lines.append(line(f"y{n}", function, before, f"w{n}"))
        lines.append(line(f"z{n}", "add", before, f"y{n}"))
        before = f"z{n}"
    return [*lines, line("loss", "sum", before)]


def test_equal_layers_become_calls_with_their_parameters() -> None:
    split = find_regions(layers("f", "f", "f"), ["loss"])
    assert split is not None
    assert split.arguments == ("x", "w0") and split.returns == ("z0",)
    assert [each.statement for each in split.body] == ["y0 = f(x, w0)", "z0 = add(x, y0)"]
    assert "\n".join(write_body(split.lines, ["loss"])).split("; del")[0].startswith("    x = ")
    calls = [each.statement for each in split.lines if "region" in each.expression]
    assert calls == ["z0, = region(x, w0)", "z1, = region(z0, w1)", "z2, = region(z1, w2)"]
    assert split.lines[-1].statement == "loss = sum(z2)"


def test_what_a_layer_hands_on_to_any_later_line_is_returned_by_all() -> None:
    lines = layers("f", "f", "f")
    split = find_regions([*lines[:-1], line("loss", "sum", "z2", "y1")], ["loss"])
    assert split is not None and split.returns == ("y0", "z0")


def test_layers_that_differ_are_no_regions() -> None:
    assert find_regions(layers("f"), ["loss"]) is None
    split = find_regions(layers("f", "g", "h"), ["loss"])
    assert split is None


def test_a_variable_with_the_name_of_an_operator_is_not_taken_for_it() -> None:
    lines = [Line(("x",), "inputs[0]", ())]
    for name, before in (("relu", "x"), ("gelu", "relu"), ("silu", "gelu")):
        lines.append(Line((name,), f"aten.{name}.default({before})", (before,)))
    assert find_regions(lines, ["silu"]) is None


def test_layers_that_read_other_variables_than_their_own_are_no_regions() -> None:
    lines = layers("f", "f")
    crossed = [lines[0], *lines[1:4], lines[4], line("y1", "f", "z0", "w0"), *lines[6:]]
    split = find_regions(crossed, ["loss"])
    assert split is None or split.arguments == ("x", "w0")
