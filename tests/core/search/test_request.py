"""What a request for a search refuses, whichever search it is for."""

from __future__ import annotations

import pytest

from core.search.handmade import case_a
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.search.request import SearchRequest
from shardwright.errors import StrategyError


def test_an_unknown_pin_is_refused_with_the_nearest_names() -> None:
    match = r"not in the model: layr2, nosuch\nfor 'layr2', use one of layer2"
    with pytest.raises(StrategyError, match=match):
        SearchRequest(case_a(), prime_mesh(8), pinned={"layr2": {}, "nosuch": {}})
