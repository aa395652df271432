"""The part of a backend that trains on one replica, by calls of Python."""

from __future__ import annotations

from typing import Any, Callable


class OneReplica:
    """Answers what the interface asks about replicas and workers: there is one."""

    def runs_in_python(self, model: Any) -> bool:
        del model
        return True

    def trace_now(self) -> Any:
        return None  # what is noted may leave the function that is differentiated

    def replicas(self, model: Any) -> int:
        del model
        return 1

    def is_multi_worker(self, model: Any) -> bool:
        del model
        return False

    def on_replicas(self, model: Any, function: Callable[..., Any], *args: Any) -> Any:
        del model
        return function(*args)

    def local_results(self, model: Any, value: Any) -> list[Any]:
        del model
        return [value]

    def reduce(self, model: Any, function: Callable[..., Any], *args: Any) -> Any:
        del model
        return function(*args)

    def sum_over_replicas(self, values: list[Any]) -> list[Any]:
        return values

    def largest_of_all(self, model: Any, value: int) -> int:
        del model
        return value
