"""The callback base class."""

from leyden.core.callback import Callback, Checkpoint


class Named(Callback):
    def __init__(self, monitor: str, mode: str) -> None:
        self.monitor, self.mode = monitor, mode

    @property
    def state_key(self) -> str:
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)


def test_state_key() -> None:
    assert Callback().state_key == "Callback"
    assert Named("loss", "min").state_key == "Named{'monitor': 'loss', 'mode': 'min'}"


def test_defaults_do_nothing() -> None:
    callback = Callback()
    assert callback.state_dict() == {}
    callback.load_state_dict({"a": 1})
    assert callback.on_train_batch_end(None, None, None, None, 0) is None  # type: ignore[func-returns-value,arg-type]
    assert issubclass(Checkpoint, Callback)
