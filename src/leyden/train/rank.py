"""The life of a rank, from the fork to its last word."""

import contextlib
import datetime
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from typing import Any, NoReturn

from leyden.base.log import rank_zero_only
from leyden.dist import worker
from leyden.dist.env import DistInfo
from leyden.train import context, session
from leyden.train.messages import ErrorInfo, Failed, Finished, RankPlan, Ready
from leyden.train.payload import call_with_config, dump_value, unpack_payload
from leyden.train.runfile import check_shared
from leyden.train.session import Session, SocketChannel

__all__ = ["error_info", "install", "main"]

_FINISHED = "leyden/finished"


def main(plan: RankPlan, payload: int, sock: int, log: int) -> NoReturn:
    """Runs in the forked process, in its main thread, and ends it.

    Args:
        plan: This rank's.
        payload: Descriptor of the file with the function.
        sock: Descriptor of the connection to the agent.
        log: Descriptor of the log, which becomes the standard output.
    """
    _redirect(log)
    channel = SocketChannel(socket.socket(fileno=sock))
    code = 0
    try:
        _set_environment(plan)
        store = _join(plan)
        channel.send(Ready(plan.attempt, plan.rank, os.getpid(), time.time()))
        value = _run(plan, channel, lambda: _read(payload))
        channel.send(Finished(plan.attempt, plan.rank, dump_value(value) if plan.rank == 0 else None, time.time()))
        _leave_group(plan, store)
    except BaseException as error:  # whatever ends the function ends the rank, and must be told
        info = error_info(error)
        sys.stderr.write(info.traceback)
        _flush()
        channel.send(Failed(plan.attempt, plan.rank, info, ()))
        code = 1
    _exit(code)


def install(plan: RankPlan, current: Session) -> None:
    """Makes the worker known to `leyden.train`'s functions and to a Trainer in this process."""
    if plan.node_rank:  # a folder of this machine only would be found out at the first checkpoint, hours later
        check_shared(current.storage)
    session.set_current(current)
    info = DistInfo(
        global_rank=plan.rank,
        local_rank=plan.local_rank,
        node_rank=plan.node_rank,
        world_size=plan.world_size,
        local_world_size=plan.local_world_size,
        main_address=plan.master_addr,
        main_port=plan.master_port,
    )
    worker.set_current(
        worker.Worker(
            info, current.device, context.report_folder, context.latest_folder, current.stop_requested, plan.run_name
        )
    )


def error_info(error: BaseException) -> ErrorInfo:
    """An exception as text: its type, its message, and its traceback from the user's first frame on."""
    now = time.time()
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename in _OWN_FILES:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = str(error)
    except Exception as second:  # a user's __str__
        message = f"<its text can't be had: {type(second).__name__}>"
    return ErrorInfo(name, message, text, now)


_OWN_FILES = {__file__, call_with_config.__code__.co_filename}


def _run(plan: RankPlan, channel: SocketChannel, payload: Callable[[], bytes]) -> Any:
    train_func, config, datasets = unpack_payload(payload())
    current = Session(plan, channel, datasets)
    current.device = _device(plan)
    install(plan, current)
    try:
        value = call_with_config(train_func, config)
    except SystemExit as leave:
        if leave.code not in (None, 0):
            raise
        value = None  # sys.exit() of a script that became a function
    current.finish_upload()
    return value


def _redirect(log: int) -> None:
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        # Whole lines are in the file whatever happens next.
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)


def _set_environment(plan: RankPlan) -> None:
    """Makes the forked process what a freshly started one would be."""
    import torch

    # Pickle finds functions by module: those of the script travel by value, and must not be looked up in the agent's.
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = [""]
    for name in plan.unset:
        os.environ.pop(name, None)
    os.environ.update(plan.environment)
    device = _device(plan)
    os.environ.update(
        MASTER_ADDR=plan.master_addr,
        MASTER_PORT=str(plan.master_port),
        RANK=str(plan.rank),
        LOCAL_RANK=str(plan.local_rank),
        WORLD_SIZE=str(plan.world_size),
        LOCAL_WORLD_SIZE=str(plan.local_world_size),
        NODE_RANK=str(plan.node_rank),
        ACCELERATE_TORCH_DEVICE=device,
    )
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if plan.local_world_size == plan.world_size and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # asks no name server, and meets no firewall
    rank_zero_only.rank = plan.rank  # pyright: ignore[reportFunctionMemberAccess]
    if plan.threads and "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(plan.threads)
        torch.set_num_threads(plan.threads)
    elif os.environ.get("OMP_NUM_THREADS", "").isdigit():
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # set after the warm process had started
    if plan.visible_devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(_device_names(plan.visible_devices))
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all ranks would draw the same numbers
    if sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/self/comm", "w") as name:
            name.write(f"leyden-rank{plan.rank}")


def _device_names(devices: tuple[int, ...]) -> list[str]:
    """Where the variable holds names instead of numbers, ``devices`` are positions among them."""
    given = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if any(not name.isdigit() for name in given):
        return [given[device] for device in devices]
    return [str(device) for device in devices]


def _device(plan: RankPlan) -> str:
    if not plan.devices:
        return "cpu"
    visible = plan.visible_devices or plan.devices
    return f"cuda:{visible.index(plan.devices[0])}"


def _join(plan: RankPlan) -> Any:
    """Meets the other ranks; returns the store that they met at."""
    import torch
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=plan.timeout_s)
    # A store of our own: its address is settled, and it outlives whatever the user's code does with the group.
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        plan.master_addr,
        plan.master_port,
        plan.world_size,
        is_master=plan.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
    )
    device = torch.device(_device(plan))
    backend = plan.backend or ("gloo" if device.type == "cpu" else "nccl")
    options: dict[str, Any] = {"device_id": device} if backend == "nccl" else {}
    dist.init_process_group(
        backend, store=store, rank=plan.rank, world_size=plan.world_size, timeout=timeout, **options
    )
    return store


def _leave_group(plan: RankPlan, store: Any) -> None:
    """Rank 0 holds the store, which the others may need to their end: it leaves last."""
    import torch.distributed as dist

    store.set(f"{_FINISHED}/{plan.rank}", "")
    if plan.rank == 0:
        forever = datetime.timedelta(days=365)  # a rank that never comes is the controller's business
        store.wait([f"{_FINISHED}/{rank}" for rank in range(plan.world_size)], forever)
    if dist.is_initialized():
        dist.destroy_process_group()


def _read(descriptor: int) -> bytes:
    """All of a file that other ranks read at the same time, through the same position."""
    size = os.fstat(descriptor).st_size
    parts, start = [], 0
    while start < size and (part := os.pread(descriptor, size - start, start)):
        parts.append(part)
        start += len(part)
    os.close(descriptor)
    return b"".join(parts)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by the user's code
            stream.flush()


def _exit(code: int) -> NoReturn:
    """Ends as the interpreter would, but without taking the modules apart, in which threads of torch can abort."""
    import atexit

    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
    finally:
        _flush()
        os._exit(code)
