"""Compares an adapter's class with the framework's base class that it implements."""

import inspect


def check_implements(ours, theirs):
    """Assert that every public method that both define takes what the framework passes.

    Each of ours starts with the arguments of theirs, of the same names and kinds.
    """
    assert issubclass(ours, theirs)
    assert not inspect.isabstract(ours), ours.__abstractmethods__
    shared = [name for name in vars(ours) if not name.startswith("_") and hasattr(theirs, name)]
    assert set(theirs.__abstractmethods__) <= set(shared)
    for name in shared:
        got, want = (inspect.getattr_static(cls, name) for cls in (ours, theirs))
        assert isinstance(got, property) == isinstance(want, property), name
        if not isinstance(got, property):
            got, want = (inspect.signature(method).parameters for method in (got, want))
            assert list(got) == list(want), name
            assert [p.kind for p in got.values()] == [p.kind for p in want.values()], name
    return shared
