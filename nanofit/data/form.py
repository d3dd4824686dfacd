"""What a JSON file must look like before anybody relies on it.

A form is a type, a tuple of forms any of which will do, a list with the form of each element, or a
dictionary of forms by key, where `...` stands for any key; keys that it does not name are free.
"""

import json
from pathlib import Path
from typing import Any

from nanofit.files import read_small

LARGEST_FILE = 2**26
LARGEST_NUMBER = 2**63


def read_json(path: Path, form: Any) -> Any:
    """The file's content, if it has the form; ValueError if not, OSError if it cannot be read."""
    try:
        value = json.loads(read_small(path, LARGEST_FILE))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not has_form(value, form):
        raise ValueError("not of the form it should have")
    return value


def has_form(value: Any, form: Any) -> bool:
    """Whether a value read from JSON has a form; numbers must be small enough to count with."""
    if isinstance(form, tuple):
        return any(has_form(value, one) for one in form)
    if isinstance(form, list):
        return isinstance(value, list) and all(has_form(one, form[0]) for one in value)
    if isinstance(form, dict):
        return isinstance(value, dict) and all(
            all(has_form(one, inner) for one in value.values())
            if key is ...
            else key in value and has_form(value[key], inner)
            for key, inner in form.items()
        )
    if form is int:
        return type(value) is int and 0 <= value < LARGEST_NUMBER
    if form is float:
        return type(value) in (int, float) and abs(value) < LARGEST_NUMBER  # nor is it nan
    return value is None if form is None else type(value) is form
