"""Several processes that train one model: the process group, the mesh, and how a model is wrapped."""

from __future__ import annotations

from .ranks import Elsewhere, Ranks, processes
from .wrap import Layout, parallelize

__all__ = ["Elsewhere", "Layout", "Ranks", "parallelize", "processes"]
