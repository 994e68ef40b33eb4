"""Ranks as threads of one process: a `Comm` that talks through shared memory, and counts what it is asked."""

import threading

import torch


class ThreadComm:
    """The part of `leyden.dist.comm.Comm` that loops use."""

    host_group = None

    def __init__(self, world, rank):
        self._world = world
        self.rank = rank
        self.world_size = world.size
        self.calls = []

    def _exchange(self, value):
        return self._world.exchange(self.rank, value)

    def all_gather_object(self, value):
        self.calls.append("all_gather_object")
        return self._exchange(value)

    def all_reduce(self, tensor, op="mean", group=None):
        self.calls.append(f"all_reduce {op}")
        tensors = self._exchange(tensor.clone())
        assert len({t.shape for t in tensors}) == 1, "ranks reduce different shapes"
        stacked = torch.stack(tensors)
        if op in ("min", "max"):
            return getattr(torch, f"a{op}")(stacked, 0)
        return stacked.mean(0) if op == "mean" else stacked.sum(0)

    def reduce_bool(self, decision, all=True):
        self.calls.append("reduce_bool")
        votes = self._exchange(decision)
        return min(votes) if all else max(votes)


class World:
    """Runs a function once per rank, each in its own thread."""

    def __init__(self, size=2, timeout=10):
        self.size = size
        self._box = [None] * size
        self._barrier = threading.Barrier(size, timeout=timeout)

    def exchange(self, rank, value):
        self._box[rank] = value
        self._barrier.wait()
        everyone = list(self._box)
        self._barrier.wait()
        return everyone

    def run(self, function):
        """Returns ``[function(comm of rank 0), ...]``; an error of any rank is raised."""
        results, errors = [None] * self.size, []

        def work(rank):
            try:
                results[rank] = function(ThreadComm(self, rank))
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        for error in real or errors:
            raise error
        return results
