"""How find-batch looks for the largest size: with an oracle in place of runs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline_advisor.memory.find_batch import proposed, search


@given(limit=st.integers(0, 3000), start=st.integers(1, 600), most=st.integers(1, 2048))
def test_the_answer_fits_and_what_is_refused_is_close(limit: int, start: int, most: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    low, high = search(fits, start=start, most=most)
    assert low <= min(limit, most)
    if limit == 0:
        assert low == 0
        assert high == 1
    elif limit >= most:
        assert (low, high) == (most, None)
    else:
        assert high is not None
        assert low <= limit < high
        assert high - low <= max(1, low // 16)
    assert len(tried) == len(set(tried)) <= 24


def test_the_size_that_is_proposed_was_tried_itself() -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size != 32  # a larger one fits, and this one is refused all the same

    assert proposed(fits, most=48, share=64) == 16
    assert tried == [32, 16]
    assert proposed(lambda _: False, most=48, share=64) == 0
