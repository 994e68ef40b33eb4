import pytest
import torch

from leyden.base.errors import MisconfigurationException
from leyden.dist import devices as module
from leyden.dist.devices import (
    Accelerator,
    AcceleratorRegistry,
    CPUAccelerator,
    CUDAAccelerator,
    MPSAccelerator,
    find_usable_cuda_devices,
    parse_gpu_devices,
    resolve_accelerator,
)


@pytest.mark.parametrize(("devices", "count"), [(1, 1), (4, 4), ("2", 2), (" 3 ", 3)])
def test_cpu_devices(devices, count):
    assert CPUAccelerator.parse_devices(devices) == count
    assert CPUAccelerator.get_parallel_devices(devices) == [torch.device("cpu")] * count


@pytest.mark.parametrize("devices", [0, -1, "0", "-1", [0], "0,1", None, True, 1.0])
def test_cpu_devices_are_a_count(devices):
    with pytest.raises(TypeError, match="on the CPU must be a number of processes, an int above 0"):
        CPUAccelerator.parse_devices(devices)


@pytest.mark.parametrize(
    ("devices", "indices"),
    [
        (1, [0]),
        (3, [0, 1, 2]),
        ("3", [0, 1, 2]),
        (-1, [0, 1, 2, 3]),
        ("-1", [0, 1, 2, 3]),
        ([2], [2]),
        ((1, 3), [1, 3]),
        ("0,", [0]),
        ("1, 3", [1, 3]),
        ("[3,0]", [3, 0]),
    ],
)
def test_gpu_devices(devices, indices):
    assert parse_gpu_devices(devices, available=4, kind="cuda") == indices


@pytest.mark.parametrize(
    ("devices", "error", "message"),
    [
        (9, MisconfigurationException, r"devices=9, but this host has 4 cuda GPUs: pass devices<=4 or more num_nodes"),
        ([0, 4], MisconfigurationException, r"names GPU 4, but this host has 4 cuda GPUs: use indices 0 to 3"),
        ("5,", MisconfigurationException, r"names GPU 5"),
        ([1, 1], MisconfigurationException, "names a GPU twice"),
        (0, MisconfigurationException, "asks for no GPU at all; pass devices>=1"),
        ("0", MisconfigurationException, "asks for no GPU at all"),
        ([], MisconfigurationException, "asks for no GPU at all"),
        ("", MisconfigurationException, "asks for no GPU at all"),
        (-2, MisconfigurationException, "must be -1"),
        (1.5, TypeError, "must be an int, a str or a list of ints"),
        (None, TypeError, "must be an int"),
        (True, TypeError, "must be an int"),
        ([True], TypeError, "must be an int"),
        (["0"], TypeError, "must be an int"),
        ("two", TypeError, "the str forms are"),
    ],
)
def test_gpu_devices_errors(devices, error, message):
    with pytest.raises(error, match=message):
        parse_gpu_devices(devices, available=4, kind="cuda")


def test_no_gpu_at_all():
    with pytest.raises(MisconfigurationException, match="asks for all cuda GPUs, but this host has none"):
        parse_gpu_devices(-1, available=0, kind="cuda")
    with pytest.raises(
        MisconfigurationException, match=r"devices=1, but this host has no cuda GPU .* accelerator='cpu'"
    ):
        parse_gpu_devices(1, available=0, kind="cuda")


def test_one_visible_gpu_per_process_under_torchrun(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    assert parse_gpu_devices(4, available=1, kind="cuda") == [0, 1, 2, 3]


def test_resolve_by_name_and_by_instance(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: False))
    assert type(resolve_accelerator("cpu")) is CPUAccelerator
    assert type(resolve_accelerator("auto")) is CPUAccelerator
    own = CPUAccelerator()
    assert resolve_accelerator(own) is own
    with pytest.raises(MisconfigurationException, match=r"accelerator='gpu' was asked for.*available here: 'cpu'"):
        resolve_accelerator("gpu")
    with pytest.raises(ValueError, match="accelerator='tpu' needs torch_xla"):
        resolve_accelerator("tpu")
    with pytest.raises(ValueError, match="accelerator='cdua' is unknown; did you mean 'cuda'"):
        resolve_accelerator("cdua")
    with pytest.raises(ValueError, match="accelerator=None must be a name"):
        resolve_accelerator(None)


def test_resolve_prefers_the_best(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: False))
    assert type(resolve_accelerator("auto")) is CUDAAccelerator
    assert type(resolve_accelerator("gpu")) is CUDAAccelerator
    assert CUDAAccelerator.auto_device_count() == 2
    assert CUDAAccelerator.get_parallel_devices([1]) == [torch.device("cuda:1")]
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))
    assert type(resolve_accelerator("gpu")) is MPSAccelerator
    assert MPSAccelerator.get_parallel_devices(MPSAccelerator.parse_devices(1)) == [torch.device("mps:0")]


def test_own_accelerator():
    class Abacus(CPUAccelerator):
        @staticmethod
        def name():
            return "abacus"

    Abacus.register_accelerators(AcceleratorRegistry)
    try:
        assert type(resolve_accelerator("abacus")) is Abacus
    finally:
        AcceleratorRegistry.remove("abacus")


def test_wrong_device_for_the_accelerator():
    CPUAccelerator().setup_device(torch.device("cpu"))
    with pytest.raises(MisconfigurationException, match="the strategy's device is meta, but the accelerator is 'cpu'"):
        CPUAccelerator().setup_device(torch.device("meta"))
    with pytest.raises(MisconfigurationException, match="but the accelerator is 'cuda': pass accelerator='cpu'"):
        CUDAAccelerator().setup_device(torch.device("cpu"))


def test_cpu_statistics_and_the_default():
    assert set(CPUAccelerator().get_device_stats("cpu")) == {"cpu_vm_percent", "cpu_percent", "cpu_swap_percent"}
    with pytest.raises(NotImplementedError, match="CPUAccelerator has no device statistics"):
        Accelerator.get_device_stats(CPUAccelerator(), "cpu")


def test_usable_cuda_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)

    def tensor(value, device):
        if device.index == 1:
            raise RuntimeError("busy")

    monkeypatch.setattr(module.torch, "tensor", tensor)
    assert find_usable_cuda_devices() == [0, 2]
    assert find_usable_cuda_devices(1) == [0]
    assert find_usable_cuda_devices(0) == []
    with pytest.raises(RuntimeError, match=r"num_devices=3, but only GPUs \[0, 2\] of 3"):
        find_usable_cuda_devices(3)
    with pytest.raises(ValueError, match="num_devices=4, but this host has 3 GPUs"):
        find_usable_cuda_devices(4)
