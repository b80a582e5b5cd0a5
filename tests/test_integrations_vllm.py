"""The vLLM adapter against vLLM itself: its interface, and a kernel of its on CPU ranks.

Last run with vllm 0.33.0, on a machine without a GPU; see the adapter for what was not run.
"""

import inspect

import pytest
import ranks

pytest.importorskip("vllm", reason="needs vLLM: pip install vllm")


@pytest.fixture(scope="module")
def adapter():
    """Its base class is vLLM's; what vLLM lacks here is an error, not a skip."""
    from fp4comm.integrations import vllm

    return vllm


def test_every_method_has_the_signature_that_vllm_calls(adapter):
    ours, theirs = adapter.PrepareAndFinalize, adapter.mk.FusedMoEPrepareAndFinalizeModular
    assert issubclass(ours, theirs)
    assert not ours.__abstractmethods__
    defined = [name for name in vars(ours) if not name.startswith("_")]
    assert {"prepare", "prepare_async", "finalize", "finalize_async"} <= set(defined)
    for name in defined:
        got, want = (inspect.getattr_static(cls, name) for cls in (ours, theirs))
        assert isinstance(got, property) == isinstance(want, property), name
        if not isinstance(got, property):
            got, want = (inspect.signature(method).parameters for method in (got, want))
            assert list(got) == list(want), name
            assert [p.kind for p in got.values()] == [p.kind for p in want.values()], name


def test_prepare_returns_as_many_values_as_vllm_unpacks(adapter):
    assert len(adapter.mk.PrepareResultType.__args__) == 5


def test_vllm_finds_the_plugin_and_a_factory_to_put_it_before(adapter):
    parameters = inspect.signature(adapter.all2all_utils.maybe_make_prepare_finalize).parameters
    assert {"moe", "use_monolithic"} <= set(parameters)
    from vllm.plugins import DEFAULT_PLUGINS_GROUP

    text = (ranks.ROOT / "pyproject.toml").read_text()
    assert f'[project.entry-points."{DEFAULT_PLUGINS_GROUP}"]' in text


def test_a_release_without_the_factory_is_refused(adapter, monkeypatch):
    def factory(moe, quant_config):
        return None

    monkeypatch.setattr(adapter.all2all_utils, "maybe_make_prepare_finalize", factory)
    with pytest.raises(
        RuntimeError, match="expected maybe_make_prepare_finalize.* without use_mon"
    ):
        adapter.install("mxfp4")


def test_a_kernel_of_vllm_on_two_ranks():
    ranks.passed(*ranks.torch_ranks(2, "vllm_experts.py", timeout=150))
