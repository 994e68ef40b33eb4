"""Which errors mean that memory ran out, and detaching of collections."""

import pytest
import torch

from leyden.base import memory


@pytest.mark.parametrize(
    ("error", "oom"),
    [
        (RuntimeError("CUDA error: out of memory"), True),
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("CUDA out of memory"), False),
    ],
)
def test_is_oom_error(error, oom):
    assert memory.is_oom_error(error) is oom


def test_garbage_collection_survives_want_of_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def fail(text):
        def empty_cache():
            raise RuntimeError(text)

        return empty_cache

    monkeypatch.setattr(torch.cuda, "empty_cache", fail("CUDA error: out of memory"))
    memory.garbage_collection_cuda()
    monkeypatch.setattr(torch.cuda, "empty_cache", fail("illegal address"))
    with pytest.raises(RuntimeError, match="illegal address"):
        memory.garbage_collection_cuda()


def test_garbage_collection_without_cuda():
    memory.garbage_collection_cuda()


def test_recursive_detach():
    x = torch.ones(2, requires_grad=True)
    detached = memory.recursive_detach({"a": x * 2, "b": [x, 3]}, to_cpu=True)
    assert not detached["a"].requires_grad
    assert not detached["b"][0].requires_grad
    assert detached["b"][1] == 3
    assert x.requires_grad
