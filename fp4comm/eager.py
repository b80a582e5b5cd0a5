"""Keep torch.compile out of what it cannot trace: it breaks its graph there and goes on behind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Run a function as it stands, also in compiled code.

    It is `torch.compiler.disable`, applied only while the compiler looks on: that takes seconds to
    load.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return run  # type: ignore[return-value]
