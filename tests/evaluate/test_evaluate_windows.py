"""Windows: each target once, with as much context as promised."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resformer.errors import UserError
from resformer.evaluate.windows import by_length, check_stride, padded, slide


@given(
    size=st.integers(0, 60),
    first=st.integers(1, 4),
    length=st.integers(1, 17),
    share=st.floats(0, 1),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_each_target_once_with_its_context(size: int, first: int, length: int, share: float, cuts: list[int]) -> None:
    stride = max(1, round(share * length))
    sequence = np.arange(size) + 100
    ends = sorted({cut for cut in cuts if cut < size})
    seen: list[int] = []
    for window in slide(np.split(sequence, ends), first=first, length=length, stride=stride):
        assert 1 <= len(window.mask) == len(window.tokens) - 1 <= length
        assert (window.tokens == sequence[window.start : window.start + len(window.tokens)]).all()
        for place in np.flatnonzero(window.mask):
            target = window.start + 1 + int(place)
            context = int(place) + 1
            assert context >= min(target, length - stride + 1)
            seen.append(target)
    assert seen == list(range(first, size))


def test_without_a_stride_windows_do_not_overlap() -> None:
    windows = list(slide([np.arange(11)], first=1, length=4))
    assert [window.tokens.tolist() for window in windows] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9, 10]]
    assert all(window.mask.all() for window in windows)


def test_the_order_by_length_is_that_of_whole_batches() -> None:
    windows = [window for n in range(2, 200) for window in slide([np.arange(n % 9 + 2)], first=1, length=20, item=n)]
    found = list(by_length(windows, 2))
    assert sorted(window.item for window in found) == list(range(2, 200))
    assert [len(window.tokens) for window in found[:64]] == sorted((len(w.tokens) for w in windows[:64]), reverse=True)


def test_padding_is_on_the_right() -> None:
    assert padded([np.array([1]), np.array([1, 2, 3])], 0).tolist() == [[1, 0, 0], [1, 2, 3]]


def test_a_stride_that_leaves_tokens_out_is_refused() -> None:
    check_stride(None, 8)
    check_stride(8, 8)
    for stride in (0, 9):
        with pytest.raises(UserError, match=f"--stride is {stride}; expected 1 to the sequence length"):
            check_stride(stride, 8)
