"""Trees of data: mapping, moving, batch sizes, scalars."""

import warnings
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from functools import cached_property

import numpy
import pytest
import torch
from torch import Tensor

from leyden.base import log as log_module
from leyden.base import tree
from leyden.base.errors import MisconfigurationException
from leyden.base.tree import apply_to_collection, extract_batch_size, move_to_device, to_scalars, to_tensors

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: Tensor
    name: str
    made: int = field(default=3, init=False)

    @cached_property
    def total(self) -> float:
        return float(self.x.sum())


@dataclass(frozen=True)
class Frozen:
    x: Tensor


class Movable:
    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def to(self, device: torch.device) -> "Movable":
        return Movable(str(device))


class MovableInPlace(Movable):
    def to(self, device: torch.device) -> None:
        self.device = str(device)


def double(value: Tensor, by: int = 2) -> Tensor:
    return value * by


def test_apply_keeps_every_container_type() -> None:
    one = torch.ones(1)
    data = {
        "list": [one, "text", 3],
        "tuple": (one, [one]),
        "named": Pair(one, None),
        "ordered": OrderedDict(a=one),
        "default": defaultdict(list, b=one),
        "user": UserDict(c=one),
        "data": Sample(one, "n"),
        "atoms": [b"bytes", range(3), bytearray(b"x")],
        "set": {1, 2},
    }
    result = apply_to_collection(data, Tensor, double, by=3)
    assert type(result["list"]) is list
    assert result["list"][0].item() == 3
    assert result["list"][1:] == ["text", 3]
    assert type(result["tuple"]) is tuple
    assert result["tuple"][1][0].item() == 3
    assert type(result["named"]) is Pair
    assert result["named"].x.item() == 3
    assert result["named"].y is None
    assert type(result["ordered"]) is OrderedDict
    assert result["default"].default_factory is list
    assert result["default"]["missing"] == []
    assert type(result["user"]) is UserDict
    assert result["user"]["c"].item() == 3
    assert result["data"].x.item() == 3
    assert data["data"].x.item() == 1, "the original dataclass is untouched"
    assert result["atoms"] == [b"bytes", range(3), bytearray(b"x")]
    assert result["set"] is data["set"]


def test_apply_to_a_single_element_and_to_none() -> None:
    assert apply_to_collection(torch.ones(1), Tensor, double).item() == 2
    assert apply_to_collection(None, Tensor, double) is None


def test_apply_wrong_dtype_and_include_none() -> None:
    data = [1, True, 2.0]
    assert apply_to_collection(data, int, lambda v: v + 1, wrong_dtype=bool) == [2, True, 2.0]
    assert apply_to_collection(data, int, lambda v: None, include_none=False) == [2.0]
    assert apply_to_collection({"a": 1, "b": 2.0}, int, lambda v: None, include_none=False) == {"b": 2.0}


def test_apply_to_dataclasses() -> None:
    sample = Sample(torch.ones(2), "n")
    assert sample.total == 2.0
    result = apply_to_collection(sample, Tensor, double)
    assert result.total == 4.0, "a cached property is computed anew"
    assert result.made == 3
    assert apply_to_collection(Frozen(torch.ones(1)), Tensor, double).x.item() == 2
    with pytest.raises(ValueError, match="Frozen is a frozen dataclass"):
        apply_to_collection(Frozen(torch.ones(1)), Tensor, double, allow_frozen=False)
    assert apply_to_collection(Sample, Tensor, double) is Sample, "a class is no instance"


def test_move_returns_the_same_objects_when_nothing_moves() -> None:
    for data in (torch.ones(2), (torch.ones(1), "a"), [torch.ones(1)], {"x": [torch.ones(1)], "n": 1}, None, "text", 3):
        assert move_to_device(data, "cpu") is data


def test_move_to_another_device() -> None:
    one = torch.ones(2)
    data = {"a": (one, [one, "s"]), "p": Pair(one, 1), "d": Sample(one, "n"), "u": UserDict(x=one), "m": Movable()}
    moved = move_to_device(data, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert type(moved["a"]) is tuple
    assert moved["a"][1][0].is_meta
    assert moved["a"][1][1] == "s"
    assert moved["p"].x.is_meta
    assert moved["d"].x.is_meta
    assert moved["u"]["x"].is_meta
    assert moved["m"].device == "meta"
    assert not data["a"][0].is_meta
    assert move_to_device([one], "meta")[0].is_meta
    assert move_to_device(torch.nn.Parameter(one), "meta").is_meta


def test_move_in_place_objects_and_packed_sequences() -> None:
    thing = MovableInPlace()
    assert move_to_device([thing], "meta")[0] is thing
    assert thing.device == "meta"
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert move_to_device(packed, "meta").data.is_meta


def test_move_asks_for_a_non_blocking_copy_on_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    class Spy(Tensor):
        def to(self, device: torch.device, non_blocking: bool = False) -> Tensor:  # type: ignore[override]
            asked.append(non_blocking)
            return self

    spy = torch.ones(1).as_subclass(Spy)
    move_to_device(spy, "cuda:0")
    move_to_device(spy, "mps")
    move_to_device(spy, "cpu")
    assert asked == [True, False, False]


def test_to_tensors() -> None:
    result = to_tensors([True, 2, 0.5, numpy.arange(3), torch.ones(1), "x"], "cpu")
    assert [value.dtype for value in result[:4]] == [torch.uint8, torch.int32, torch.float32, torch.int64]
    assert result[5] == "x"
    assert to_tensors(numpy.float64(2), "cpu").dtype == torch.float32  # a numpy float64 is a Python float


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(()), 1),
        (torch.zeros(5, 2), 5),
        ([torch.zeros(4), torch.zeros(4, 3)], 4),
        ({"a": {"b": torch.zeros(7)}}, 7),
        (("name", 3, torch.zeros(2)), 2),
        (Sample(torch.zeros(6), "n"), 6),
        (UserDict(x=torch.zeros(3)), 3),
        ([None, [torch.zeros(9)]], 9),
    ],
)
def test_batch_size(batch: object, size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert extract_batch_size(batch) == size


def test_batch_size_of_disagreeing_tensors_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_said", set())
    with pytest.warns(UserWarning, match="3 and 2; 3 is used"):
        assert extract_batch_size([torch.zeros(3), torch.zeros(2)]) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert extract_batch_size([torch.zeros(3), torch.zeros(2)]) == 3


@pytest.mark.parametrize("batch", [None, "text", 3, [], {"a": "b"}, iter([torch.zeros(2)])])
def test_no_batch_size(batch: object) -> None:
    with pytest.raises(MisconfigurationException, match="batch_size=n"):
        extract_batch_size(batch)


def test_batch_that_contains_itself() -> None:
    batch: list = []
    batch.append(batch)
    with pytest.raises(RecursionError, match="batch_size=n"):
        extract_batch_size(batch)


def test_scalars() -> None:
    result = to_scalars({"b": torch.tensor(1.5), "a": 2, "t": torch.tensor([True]), "n": {"x": torch.tensor(3)}})
    assert result == {"b": 1.5, "a": 2, "t": True, "n": {"x": 3}}
    assert list(result) == ["b", "a", "t", "n"]
    assert type(result["t"]) is bool
    with pytest.raises(ValueError, match=r"metric 'loss' has shape \(2,\)"):
        to_scalars({"loss": torch.zeros(2)})


def test_packed_scalars_keep_the_bits_of_every_dtype() -> None:
    tensors = [
        torch.tensor(True),
        torch.tensor(0.1),
        torch.tensor(2**60 + 1),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor([[7]], dtype=torch.int16),
        torch.tensor(-3, dtype=torch.int8),
        torch.tensor(float("inf"), dtype=torch.float16, requires_grad=True),
    ]
    assert tree._scalars(tensors) == [tensor.item() for tensor in tensors]
    assert [type(value) for value in tree._scalars(tensors)] == [bool, float, int, float, float, int, int, float]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_scalars_and_moves_on_cuda() -> None:
    moved = move_to_device({"x": torch.ones(2), "n": [torch.tensor(3)]}, "cuda")
    assert moved["x"].is_cuda
    assert to_scalars({"x": moved["x"].sum(), "n": moved["n"][0], "c": torch.tensor(1.0)}) == {
        "x": 2.0,
        "n": 3,
        "c": 1.0,
    }
