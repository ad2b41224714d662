"""While a plan is made nothing is collected; afterwards as before."""

from __future__ import annotations

import gc

import pytest

from whale.progress import without_collecting


@pytest.mark.parametrize("was_on", [True, False])
def test_afterwards_it_is_as_before(was_on: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with pytest.raises(KeyError), without_collecting():
            with without_collecting():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if before else gc.disable)()
