"""Files of plain Python assignments, read without executing them.

Understood: literals, arithmetic, f-strings, names assigned before. Nothing else.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nanofit.files import read_small

_MOST_BYTES, _LONGEST_TEXT = 2**18, 10_000
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def read_assignments(
    path: Path, names: Mapping[str, Any], assign: Callable[[str, Any], None]
) -> Iterator[str]:
    """Call `assign(name, value)` for each assignment in a file; yield every problem met.

    Expressions may use `names`, and what the file has assigned before. Names that begin with
    an underscore serve the file's own arithmetic and are not passed on.
    """
    try:
        statements = ast.parse(read_small(path, _MOST_BYTES), str(path)).body
    except OSError as error:
        yield f"cannot read config file {path}: {error.strerror}"
        return
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        yield f"{path}:{line}: not a file of plain assignments ({getattr(error, 'msg', error)})"
        return
    names = dict(names)
    for statement in statements:
        try:
            for name, value in _assignment(statement, names):
                names[name] = value
                if not name.startswith("_"):
                    assign(name, value)
        except (ValueError, RecursionError) as error:
            yield f"{path}:{statement.lineno}: {error}"


def evaluate(text: str, names: Mapping[str, Any]) -> Any:
    """The value of one expression given as text."""
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body, names)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is not a value") from None


def _assignment(statement: ast.stmt, names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=expression):
            yield name, _evaluate(expression, names)
        case ast.Expr(value=ast.Constant(value=str())):
            pass  # a docstring
        case ast.Import(names=[ast.alias(name="time")]):
            pass  # harmless; what would be done with it is refused below
        case ast.Import() | ast.ImportFrom():
            raise ValueError("imports are not read; write the value itself")
        case _:
            first_line = ast.unparse(statement).splitlines()[0]
            raise ValueError(f"`{first_line}` is not an assignment such as `max_iters = 1000`")


def _evaluate(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=str() as text):
            return _text([text])
        case ast.Constant(value=bool() | None as value):
            return value
        case ast.Constant(value=int() | float() as value):
            return _number(value)
        case ast.Name(id=name):
            if name not in names:
                raise ValueError(f"{name} has no value here")
            return names[name]
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_number(_evaluate(operand, names)))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _combine(type(sign), _evaluate(left, names), _evaluate(right, names))
        case ast.JoinedStr(values=parts):
            return _text(_evaluate(part, names) for part in parts)
        case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
            return str(_evaluate(value, names))
        case ast.FormattedValue(value=value, conversion=-1, format_spec=spec):
            return _formatted(_evaluate(value, names), _evaluate(spec, names))
    text = ast.unparse(node)
    if "time." in text:
        raise ValueError(
            f"`{text}` would name the run anew at every launch, so that it could never be "
            "resumed; write a fixed name"
        )
    raise ValueError(f"`{text}` is neither a literal, arithmetic nor an f-string")


def _combine(sign: type, left: Any, right: Any) -> Any:
    if sign is ast.Add and isinstance(left, str) and isinstance(right, str):
        return _text([left, right])
    if sign is ast.Pow and abs(_number(right)) > 64:
        raise ValueError(f"exponent {right} is too large")
    try:
        return _number(_OPERATORS[sign](_number(left), _number(right)))
    except ArithmeticError as error:
        raise ValueError(str(error)) from None


def _text(parts: Iterable[str]) -> str:
    text = ""
    for part in parts:
        text += part
        if len(text) > _LONGEST_TEXT:
            raise ValueError("a text is too long")
    return text


def _formatted(value: Any, spec: str) -> str:
    if re.search(r"\d{3}", spec):
        raise ValueError(f"format {spec!r} is too wide")
    try:
        return format(value, spec)
    except TypeError:
        raise ValueError(f"{value!r} has no format {spec!r}") from None


def _number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    if not abs(value) < 2**63:  # neither inf nor nan, nor a power tower that takes minutes
        raise ValueError("a number is too large")
    return value
