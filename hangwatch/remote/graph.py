"""Who waits for whom, and which of them wait for ever. Pure: edges in, cycles out.

A task may wait for *all* of several others (``gather``), or for *any one* of them (a semaphore with
several holders). A cycle in the graph is a deadlock only if no task in it has a way out. So the
graph is reduced first: a task that waits for no other task can go on by itself, and so can one all
of whose needs can. What cannot be reduced is deadlocked or waits behind a deadlock; its strongly
connected parts are the deadlocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from hangwatch.remote.results import Edge, Waits


def waits(edges: Sequence[Edge]) -> Waits:
    """Return the edges with their deadlocks and roots."""
    stuck = _stuck(edges)
    inner: dict[int, list[int]] = {}
    for edge in edges:
        if edge.waiter in stuck and edge.awaited in stuck:
            inner.setdefault(edge.waiter, []).append(edge.awaited)
    cycles = [
        _shortest_cycle(part, inner)
        for part in _components(inner)
        if len(part) > 1 or part[0] in inner.get(part[0], ())
    ]
    return Waits(edges=tuple(edges), cycles=tuple(sorted(cycles)), roots=_roots(edges))


def _stuck(edges: Iterable[Edge]) -> set[int]:
    """Return the tasks that no sequence of events inside the graph can free."""
    needs: dict[int, set[int]] = {}
    any_of: dict[int, bool] = {}
    behind: dict[int, set[int]] = {}
    for edge in edges:
        needs.setdefault(edge.waiter, set()).add(edge.awaited)
        any_of[edge.waiter] = any_of.get(edge.waiter, True) and edge.alternative
        behind.setdefault(edge.awaited, set()).add(edge.waiter)
    free = deque(set(behind) - set(needs))
    stuck = set(needs)
    while free:
        task = free.popleft()
        for waiter in behind.get(task, ()):
            if waiter not in stuck:
                continue
            needs[waiter].discard(task)
            if any_of[waiter] or not needs[waiter]:
                stuck.discard(waiter)
                free.append(waiter)
    return stuck


def _components(graph: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """Return the strongly connected components (Tarjan, without recursion)."""
    number: dict[int, int] = {}
    lowest: dict[int, int] = {}
    path: list[int] = []
    on_path: set[int] = set()
    found: list[list[int]] = []
    for root in graph:
        if root in number:
            continue
        work = [(root, iter(graph[root]))]
        number[root] = lowest[root] = len(number)
        path.append(root)
        on_path.add(root)
        while work:
            node, following = work[-1]
            for child in following:
                if child not in number:
                    number[child] = lowest[child] = len(number)
                    path.append(child)
                    on_path.add(child)
                    work.append((child, iter(graph.get(child, ()))))
                    break
                if child in on_path:
                    lowest[node] = min(lowest[node], number[child])
            else:
                work.pop()
                if work:
                    parent = work[-1][0]
                    lowest[parent] = min(lowest[parent], lowest[node])
                if lowest[node] == number[node]:
                    cut = path.index(node)
                    found.append(path[cut:])
                    on_path.difference_update(path[cut:])
                    del path[cut:]
    return found


def _shortest_cycle(part: Sequence[int], graph: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Return a shortest cycle through the smallest id of a component, in waiting order."""
    inside = set(part)
    start = min(inside)
    came_from: dict[int, int] = {}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for child in graph.get(node, ()):
            if child == start:
                cycle = [node]
                while cycle[-1] != start:
                    cycle.append(came_from[cycle[-1]])
                return tuple(reversed(cycle))
            if child in inside and child not in came_from:
                came_from[child] = node
                queue.append(child)
    return tuple(sorted(inside))


def _roots(edges: Sequence[Edge]) -> tuple[int, ...]:
    """Return the awaited tasks that wait for none, those with the most behind them first."""
    waiting = {edge.waiter for edge in edges}
    counted = behind(edges, {edge.awaited for edge in edges} - waiting)
    return tuple(sorted(counted, key=lambda root: (-counted[root], root)))


def behind(edges: Iterable[Edge], roots: Iterable[int]) -> dict[int, int]:
    """Return how many tasks wait, directly or not, for each root."""
    waiters: dict[int, set[int]] = {}
    for edge in edges:
        waiters.setdefault(edge.awaited, set()).add(edge.waiter)
    counted: dict[int, int] = {}
    for root in roots:
        seen = {root}
        todo = [root]
        while todo:
            for waiter in waiters.get(todo.pop(), ()):
                if waiter not in seen:
                    seen.add(waiter)
                    todo.append(waiter)
        counted[root] = len(seen) - 1
    return counted
