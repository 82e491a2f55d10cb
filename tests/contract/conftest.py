"""Every variant, multi-head and grouped-query attention, at its defaults and with other options."""

from __future__ import annotations

import pytest
from cases import CACHED, DEFAULTS, OPTIONS, PARAMETERS, Case

from resformer.core.registry import names


@pytest.fixture(params=names())
def variant(request) -> str:
    return request.param


@pytest.fixture(params=DEFAULTS, ids=str)
def case(request) -> Case:
    """A variant at its defaults."""
    return request.param


@pytest.fixture(params=[*DEFAULTS, *OPTIONS], ids=str)
def any_case(request) -> Case:
    """A variant at its defaults or with other options."""
    return request.param


@pytest.fixture(params=CACHED, ids=str)
def cached_case(request) -> Case:
    """A variant at its defaults, or with options that change what is cached."""
    return request.param


@pytest.fixture(params=PARAMETERS, ids=str)
def parameter_case(request) -> Case:
    """A variant at its defaults, or with options that change its parameters."""
    return request.param
