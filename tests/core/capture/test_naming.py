"""Lines of operators are those of the user, whatever the folder of the file is called."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwright as sw
from shardwright.core.capture.naming import is_users_function, line_of_function


@pytest.mark.parametrize("package", [torch, sw])
def test_a_folder_whose_name_only_begins_like_ours_holds_lines_of_the_user(package: object) -> None:
    folder = Path(str(getattr(package, "__file__", ""))).parent
    code = compile("def function(): pass", f"{folder}vision/ops.py", "exec")
    space: dict[str, object] = {}
    exec(code, space)
    assert line_of_function(space["function"]) == "(ops.py:1)"
    assert not is_users_function(f"{folder}/ops.py")
