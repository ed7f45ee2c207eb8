"""Jobs that run one at a time, in an order that a seed decides.

Whenever a job does something that others can see, it pauses, and the seed picks who goes on: a job that is able to, or
a copy or matrix product that was started before.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any


class Orders:
    """Each job, copy and product has a speed of its own, from 1 to 100,000. So it may be late by far."""

    def __init__(self, seed: int):
        self.random, self.main = random.Random(seed), threading.Semaphore(0)
        self.hardware: dict[tuple, Any] = {}  # barriers by program and name
        self.barriers: dict[int, list[list]] = {}  # mbarriers of each program
        self.met: Counter[int] = Counter()  # of a program: how often its consumers called meet()
        self.speeds: dict[Any, float] = {}  # of the jobs that have not ended, and the copies and products in flight

    def add(self, one: Any) -> None:
        self.speeds[one] = 10 ** self.random.uniform(0, 5)

    def run(self) -> None:
        while self.speeds:
            able = {one: speed for one, speed in self.speeds.items() if not isinstance(one, Job) or one.ready()}
            assert able, "deadlock: " + ", ".join(sorted(job.name for job in self.speeds))
            (chosen,) = self.random.choices(list(able), list(able.values()))
            if isinstance(chosen, Job):
                chosen.turn.release()
                self.main.acquire()
                if chosen.error:
                    raise chosen.error
            else:
                del self.speeds[chosen]
                chosen()


class Job(threading.Thread):
    """A job of a program. until: what it waits for."""

    def __init__(self, orders: Orders, program: int, programs: int, do: Callable, *args):
        super().__init__(daemon=True, name=getattr(do, "__name__", "?"))
        self.orders, self.do, self.args = orders, do, args
        self.program, self.programs = program, programs
        self.turn, self.error = threading.Semaphore(0), None
        self.ready: Callable[[], bool] = lambda: True
        self.products: list[Any] = []  # in flight, the oldest first
        self.leaving = 0  # copies to memory that have not read their place
        self.landing = 0  # those that have not written to memory
        self.meetings = 0
        self.seen: tuple | None = None  # what acquired() found last
        orders.add(self)
        self.start()

    def run(self) -> None:
        self.turn.acquire()
        try:
            self.do(*self.args)
        except Exception as error:  # goes to the thread of the test
            self.error = error
        del self.orders.speeds[self]
        self.orders.main.release()

    def pause(self, until: Callable[[], bool] = lambda: True) -> None:
        """Lets others go on, until `until` holds."""
        self.ready = until
        self.orders.main.release()
        self.turn.acquire()

    def wait_copies(self, left: int) -> None:
        self.pause(lambda: self.leaving <= left)

    def wait_written(self) -> None:
        self.pause(lambda: self.landing == 0)

    def meet(self) -> None:
        """Both consumers meet once for each of their calls."""
        self.meetings += 1
        self.orders.met[self.program] += 1
        self.pause(lambda: self.orders.met[self.program] >= 2 * self.meetings)


def job() -> Job:
    found = threading.current_thread()
    assert isinstance(found, Job)
    return found
