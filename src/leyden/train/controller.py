"""The driver's side of a run: a state machine that is turned by `Controller.tick` until the run has ended.

Decisions are pure and made elsewhere (`failure.decide`, `scaling.decide`); the ranks' lives are in `Attempt`, their
reports in `Reports`, the truth on storage in the ledger. What is left here is the order of things.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from leyden.base.log import log
from leyden.train import failure, scaling
from leyden.train.attempt import Attempt
from leyden.train.failure import Action, ControllerError, Kind, PlacementError, TrainingFailedError
from leyden.train.failure_text import group_error, headline, ranks_text
from leyden.train.groups import Event, WorkerGroup
from leyden.train.interrupt import Interrupts
from leyden.train.messages import (
    CheckpointPart,
    Committed,
    ErrorInfo,
    Failed,
    Finished,
    Metrics,
    Output,
    StartRanks,
    StopRanks,
)
from leyden.train.plans import RunSpec, rank_plans
from leyden.train.ports import Clock, Journal, Observer
from leyden.train.reports import Reports, WrongFolderError
from leyden.train.states import ENDED, State, check_move

__all__ = ["Controller"]

POLL_S = 0.5  # Ctrl-C waits for it
PLACE_S = 1.0
FINISH_S = 30.0  # from the last Finished until the processes are gone
DRAIN_S = 5.0  # from StopRanks until they are
MOMENT_S = 0.5  # from a failure until what live ranks were just about to say is no longer waited for: a report that
# completes a checkpoint, or, where so far only collectives failed, the word of the rank that broke them


class Controller:
    """Runs one run to its end.

    Args:
        spec: What to run.
        group: The workers; the controller releases it at the end.
        journal: The run folder.
        observer: Told of reports and failures; an exception of its own ends the run.
        clock: The time.
        write: Where rank 0's output goes.
    """

    def __init__(
        self,
        spec: RunSpec,
        group: WorkerGroup,
        journal: Journal,
        observer: Observer | None = None,
        clock: Clock | None = None,
        write: Callable[[str], object] | None = None,
    ) -> None:
        self.spec = spec
        self.state = State.INIT
        self.error: TrainingFailedError | None = None
        self.value: bytes | None = None  # what rank 0 returned, as it was sent
        self._group = group
        self._journal = journal
        self._observer = observer
        self._clock = clock or Clock()
        self._write = write or _to_stdout
        self._attempt: Attempt | None = None
        self._reports = Reports(0, 1, 0)
        self._number = 0
        self._spent = failure.Spent()
        self._outcome = State.FINISHED
        self._not_before = 0.0
        self._waiting_since: float | None = None
        self._waiting_for = ""
        self._looked = 0.0  # for more places
        self._grow_to = 0
        self._ending_since: float | None = None
        self._node_ranks: Mapping[str, int] = {}
        self._steps = {
            State.INIT: self._begin,
            State.SCHEDULING: self._schedule,
            State.RUNNING: self._watch,
            State.RESTARTING: self._schedule_again,
            State.RESIZING: self._resize,
            State.SHUTTING_DOWN: self._shut_down,
        }

    def run(self) -> State:
        """Ticks until the run has ended, and releases the group.

        Ctrl-C ends it after the present tick, a second one at once.

        Returns:
            FINISHED or ERRORED; ``error`` says why the latter.

        Raises:
            KeyboardInterrupt: Ctrl-C; all ranks are gone and the run folder is in order (ABORTED).
        """
        try:
            with Interrupts() as interrupts:
                while self.state not in ENDED:
                    self.tick()
                    if interrupts.pending:
                        raise KeyboardInterrupt
        except KeyboardInterrupt:
            self.abort("interrupted")
            raise
        finally:
            self._group.release()
        return self.state

    def tick(self) -> State:
        """One turn of the run::

            events = group.poll(timeout)     # returns as soon as there is something
            absorb(events)                   # metrics to their log, commits to the ledger, failures into the attempt
            step of the state:
                INIT           -> SCHEDULING
                SCHEDULING     place; start; all ranks ready -> RUNNING
                RUNNING        all finished -> SHUTTING_DOWN; more places, and a checkpoint was committed -> RESIZING
                both           a rank failed: end the others, absorb until all are gone, failure.decide -> RESTARTING,
                               RESIZING (a node less) or SHUTTING_DOWN
                RESTARTING     clean up -> SCHEDULING, not before the back-off has passed
                RESIZING       end the ranks -> SCHEDULING
                SHUTTING_DOWN  wait for, or end, the ranks; release -> FINISHED, ERRORED or ABORTED
            every move is a line in events.jsonl; a move that the table does not have is a bug, and raises

        An exception in here is ours, not the user's: it ends the run with a `ControllerError`.
        """
        if self.state in ENDED:
            return self.state
        try:
            self._absorb(self._group.poll(self._patience()))
            self._steps[self.state]()
        except Exception as error:
            self._crash(error)
        return self.state

    def abort(self, why: str) -> None:
        """Ends the run at once, from any state: the ranks are gone when it returns, in 5 s at most."""
        if self.state in ENDED:
            return
        if self.state is not State.SHUTTING_DOWN:
            self._outcome = State.ABORTED
            self._move(State.SHUTTING_DOWN, why)
        self._stop()
        deadline = self._clock.monotonic() + 5.0
        while self.state not in ENDED and self._clock.monotonic() < deadline:
            self.tick()
        if self.state not in ENDED:
            self._group.release()
            self._end()

    # ---- what arrives ------------------------------------------------------------------------------------------------

    def _patience(self) -> float:
        """How long the next poll may wait; nothing else in a tick does, but `place`."""
        now = self._clock.monotonic()
        if self.state is State.SCHEDULING and self._attempt is None:
            return min(max(self._not_before - now, 0.0), POLL_S)
        if self.state in (State.INIT, State.RESTARTING) or (self._attempt is None and self.state is State.RESIZING):
            return 0.0
        if self._attempt is not None and self._attempt.failures:
            return 0.05
        return 0.0 if self._attempt is None else POLL_S

    def _absorb(self, events: Sequence[Event]) -> None:
        """Takes in what arrived; messages of earlier attempts are of no interest any more."""
        now, wall = self._clock.monotonic(), self._clock.wall()
        attempt = self._attempt
        for event in events:
            message = event.message
            if isinstance(message, Output):
                self._write(message.text)
            elif attempt is None or (message is not None and getattr(message, "attempt", None) != attempt.number):
                continue
            elif isinstance(message, Metrics):
                if self._reports.add_metrics(message, now):
                    self._journal.metrics(message)
            elif isinstance(message, CheckpointPart):
                self._take_part(message, attempt, now)
            else:
                attempt.take(event.node, message, now, wall)
                if isinstance(message, Finished):
                    self._reports.finish(message.rank)
        if attempt is not None:
            self._settle(attempt, now)

    def _take_part(self, message: CheckpointPart, attempt: Attempt, now: float) -> None:
        try:
            self._reports.add_part(message)
        except WrongFolderError as error:
            info = ErrorInfo("ValueError", str(error), "", message.time)
            attempt.fail(Failed(attempt.number, message.rank, info, ()), now)

    def _settle(self, attempt: Attempt, now: float) -> None:
        """Commits what is whole, tells everyone who should know, names ranks that others wait for."""
        for record in self._reports.take_commits(self._clock.wall()):
            self._journal.commit(record)
            for node in attempt.shares:
                self._group.send(node, Committed(record.index, record.folder, record.metrics))
            if self._grow_to and self.state is State.RUNNING and not attempt.failures:
                self._move(State.RESIZING, f"{record.folder} is committed", world=self._grow_to)
        if self._observer is not None and self._observer.wants_rounds:
            for done in self._reports.take_rounds(last=attempt.all_finished):
                self._observer.after_report(done.metrics, done.folder)
        for index, ranks in self._reports.lagging(now - self.spec.lag_warning_s):
            text = (
                f"the checkpoint of report {index} has waited {self.spec.lag_warning_s:.0f} s for {ranks_text(ranks)}"
            )
            log.warning("%s: every rank has to make the report, or to return, before it is committed", text)
            self._journal.event("lagging", index=index, ranks=ranks[:100])

    # ---- the states --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._number = self._journal.next_attempt()
        self._journal.status("running")
        self._move(State.SCHEDULING, "start")

    def _schedule(self) -> None:
        attempt, now = self._attempt, self._clock.monotonic()
        if attempt is None:
            if now >= self._not_before:
                self._place()
        elif attempt.failures:
            self._wind_down(attempt)
        elif attempt.all_ready:
            self._spent = failure.Spent(self._spent.failures, 0, self._spent.nodes)
            self._looked = now
            self._move(State.RUNNING, "all ranks are ready", seconds=round(now - attempt.started, 3))
            self._watch()
        elif now - attempt.started >= self.spec.start_timeout_s:
            attempt.start_timed_out(self.spec.start_timeout_s, now, self._clock.wall())

    def _place(self) -> None:
        workers, now = self.spec.workers, self._clock.monotonic()
        placement = self._group.place(workers.least, workers.most, PLACE_S)
        choice = scaling.decide(placement, workers)
        if choice.move is scaling.Move.REFUSE:
            return self._fail(ControllerError(PlacementError(choice.why)), choice.why)
        if choice.move is scaling.Move.WAIT:
            if self._waiting_since is None:
                self._waiting_since = now
            if choice.why != self._waiting_for:
                self._waiting_for = choice.why
                log.info("%s: %s", self.spec.name, choice.why)
                self._journal.event("waiting", why=choice.why)
            limit = self.spec.place_timeout_s
            if limit is not None and now - self._waiting_since >= limit:
                why = f"after {limit:g} s: {choice.why}"
                return self._fail(ControllerError(PlacementError(why)), why)
            return None
        self._waiting_since, self._waiting_for = None, ""
        return self._start(scaling.layout(placement.nodes, choice.world, self._node_ranks))

    def _start(self, shares: Sequence[scaling.Share]) -> None:
        attempt = self._attempt = Attempt(self._number, shares, self._clock.monotonic())
        self._node_ranks, self._grow_to = attempt.node_ranks(), 0
        latest = self._journal.latest()
        # Reports after the last checkpoint are made again, by the same numbers: the log of metrics knows which count.
        checkpoint, next_report = (None, 0) if latest is None else (latest.folder, latest.index + 1)
        rounds = self._observer is not None and self._observer.wants_rounds
        self._reports = Reports(self._number, attempt.world_size, next_report, rounds)
        plans = rank_plans(self.spec, shares, self._number, checkpoint, next_report)
        self._journal.event(
            "start", attempt=self._number, world=attempt.world_size, nodes=len(shares), checkpoint=checkpoint
        )
        log.info("%s: %s, from %s", self.spec.name, scaling.in_words(shares), checkpoint or "the beginning")
        for node, ranks in plans.items():
            self._group.send(node, StartRanks(ranks, self.spec.payload))

    def _watch(self) -> None:
        attempt = self._attempt
        assert attempt is not None
        if attempt.failures:
            self._wind_down(attempt)
        elif attempt.all_finished:
            self.value = attempt.value
            self._move(State.SHUTTING_DOWN, "all ranks have finished")
        elif self.spec.workers.elastic and not self._grow_to:
            self._look_for_more(attempt)

    def _look_for_more(self, attempt: Attempt) -> None:
        now = self._clock.monotonic()
        if attempt.world_size == self.spec.workers.most or now - self._looked < self.spec.resize_interval_s:
            return
        self._looked = now
        placement = self._group.place(self.spec.workers.least, self.spec.workers.most, 0.0)
        choice = scaling.decide(placement, self.spec.workers, attempt.world_size)
        if choice.move is scaling.Move.GROW:
            self._grow_to = choice.world
            log.info("%s: %s; the group grows at its next checkpoint", self.spec.name, choice.why)
            self._journal.event("grow", to=choice.world, why=choice.why)

    def _resize(self) -> None:
        attempt = self._attempt
        if attempt is not None and attempt.all_finished:
            self.value = attempt.value
            self._move(State.SHUTTING_DOWN, "all ranks finished before they were ended")
        elif attempt is None or self._drained(attempt):
            self._schedule_again()

    def _schedule_again(self) -> None:
        self._attempt = None
        self._number += 1
        self._journal.sweep()
        self._move(State.SCHEDULING, f"attempt {self._number}")

    def _wind_down(self, attempt: Attempt) -> None:
        """After a failure: lets whole checkpoints be, ends the others, and decides when nothing more can arrive.

        The rank that failed first is often not the one that was heard first, so the decision waits for the last one.
        """
        now = self._clock.monotonic()
        if attempt.stopped is None and now - (attempt.first_failure_seen or 0.0) < self._patience_with(attempt):
            return
        if not self._drained(attempt):
            return
        failures = failure.in_order(attempt.failures)
        if self._observer is not None:
            self._observer.after_exception(failure.as_exceptions(failures))
        decision = failure.decide(failures, self._spent, self.spec.budgets)
        self._spent = decision.spent
        first = headline(failures[0], attempt.world_size, first=len(failures) > 1)
        self._journal.event(
            "failure", what=first, ranks=[each.rank for each in failures[:100]], action=decision.action.value
        )
        if decision.action is Action.RAISE:
            error = group_error(failures, attempt.world_size, decision, self.spec.url, self._journal.latest())
            self._fail(error, first)
            return
        self._not_before = now + decision.delay_s
        after = f" in {decision.delay_s:g} s" if decision.delay_s else ""
        latest = self._journal.latest()
        resume = latest.folder if latest else "the beginning"
        log.warning("%s\n%s: starting again%s from %s", first, decision.why, after, resume)
        shrinks = failures[0].kind is Kind.NODE and self.spec.workers.elastic
        self._move(State.RESIZING if shrinks else State.RESTARTING, f"{first}; {decision.why}")

    def _patience_with(self, attempt: Attempt) -> float:
        """Seconds from the first failure until the other ranks are ended; 0: at once."""
        lacks = self._reports.unfinished(attempt.lost)
        if lacks == "uploads":
            return self.spec.commit_grace_s
        return MOMENT_S if lacks == "reports" or attempt.only_echoes else 0.0

    def _fail(self, error: TrainingFailedError, why: str) -> None:
        self.error, self._outcome = error, State.ERRORED
        self._move(State.SHUTTING_DOWN, why)

    def _crash(self, error: Exception) -> None:
        """Something of ours failed, or a callback, or storage for good: the first such error is the run's."""
        if self.error is None:
            self.error = ControllerError(error)
        if self._outcome is State.FINISHED:
            self._outcome = State.ERRORED
        if self.state is State.SHUTTING_DOWN:
            log.error("%s: while shutting down: %s: %s", self.spec.name, type(error).__name__, error)
            self._group.release()
            self._end()
        else:
            self._move(State.SHUTTING_DOWN, f"{type(error).__name__}: {error}")

    def _shut_down(self) -> None:
        attempt, now = self._attempt, self._clock.monotonic()
        if self._ending_since is None:
            self._ending_since = now
        if attempt is not None and not attempt.all_gone:
            patient = self._outcome is State.FINISHED and now - self._ending_since < FINISH_S
            if patient or not self._drained(attempt):
                return
        self._group.release()
        self._end()

    def _end(self) -> None:
        self._move(self._outcome, "")
        self._journal.status(self._outcome.value.lower())

    # ---- small things ------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        attempt = self._attempt
        if attempt is not None and attempt.stopped is None:
            attempt.stop(self._clock.monotonic(), self._clock.wall())
            for node in attempt.shares:
                self._group.send(node, StopRanks(self.spec.stop_grace_s))

    def _drained(self, attempt: Attempt) -> bool:
        """Ends the ranks; True when all are gone, or will not go by being asked."""
        self._stop()
        assert attempt.stopped is not None
        if attempt.all_gone:
            return True
        if self._clock.monotonic() - attempt.stopped < DRAIN_S + self.spec.stop_grace_s:
            return False
        left = attempt.world_size - len(attempt.gone)
        log.warning("%s: %d ranks did not end in %g s; their nodes are given up", self.spec.name, left, DRAIN_S)
        self._group.release()
        return True

    def _move(self, to: State, why: str, **fields: Any) -> None:
        check_move(self.state, to)
        was, self.state = self.state, to
        self._journal.event("state", was=was.value, to=to.value, attempt=self._number, why=why, **fields)


def _to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
