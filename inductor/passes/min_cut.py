"""Minimum cut of a directed graph, by Dinic's algorithm (Soviet Math. Doklady 11, 1970)."""

from __future__ import annotations

from collections import deque

UNBOUNDED = 1 << 62  # a capacity larger than any sum of bytes


class FlowGraph:
    """A directed graph with capacities, whole numbers, between vertices 0 to ``count`` - 1."""

    def __init__(self, count: int) -> None:
        self.edges: list[list[int]] = [[] for _ in range(count)]
        self.heads: list[int] = []
        self.left: list[int] = []

    def add(self, tail: int, head: int, capacity: int) -> None:
        """An edge. Number e's reverse is number e ^ 1."""
        for start, end, room in ((tail, head, capacity), (head, tail, 0)):
            self.edges[start].append(len(self.heads))
            self.heads.append(end)
            self.left.append(room)

    def minimum_cut(self, source: int, sink: int) -> tuple[int, list[bool]]:
        """Capacity of a minimum cut, and for each vertex whether it is on the sink's side.

        Of several minimum cuts this is the one nearest to the sink. Uses the graph up.
        """
        flow = 0
        while True:
            level = self._levels(source, sink)
            if level[sink] < 0:
                return flow, self._reaching(sink)
            flow += self._blocking_flow(source, sink, level)

    def _levels(self, source: int, sink: int) -> list[int]:
        """Edges from the source to each vertex on the shortest way with room; -1 where there is none."""
        level = [-1] * len(self.edges)
        level[source] = 0
        todo = deque([source])
        while todo and level[sink] < 0:
            vertex = todo.popleft()
            for edge in self.edges[vertex]:
                head = self.heads[edge]
                if self.left[edge] and level[head] < 0:
                    level[head] = level[vertex] + 1
                    todo.append(head)
        return level

    def _blocking_flow(self, source: int, sink: int, level: list[int]) -> int:
        """Fill shortest ways until each has an edge without room."""
        edges, heads, left = self.edges, self.heads, self.left
        tried = [0] * len(edges)
        way: list[int] = []
        vertex, flow = source, 0
        while True:
            if vertex == sink:
                room = min(left[edge] for edge in way)
                for edge in way:
                    left[edge] -= room
                    left[edge ^ 1] += room
                flow += room
                # Continue from the tail of the first full edge: what leads there still has room.
                full = next(at for at, edge in enumerate(way) if not left[edge])
                vertex = heads[way[full] ^ 1]
                del way[full:]
            elif tried[vertex] < len(edges[vertex]):
                edge = edges[vertex][tried[vertex]]
                if left[edge] and level[heads[edge]] == level[vertex] + 1:
                    way.append(edge)
                    vertex = heads[edge]
                else:
                    tried[vertex] += 1
            elif way:
                vertex = heads[way.pop() ^ 1]
                tried[vertex] += 1
            else:
                return flow

    def _reaching(self, sink: int) -> list[bool]:
        """Vertices from which there is a way with room to the sink."""
        reaches = [False] * len(self.edges)
        reaches[sink] = True
        todo = [sink]
        while todo:
            for edge in self.edges[todo.pop()]:
                tail = self.heads[edge]
                if self.left[edge ^ 1] and not reaches[tail]:
                    reaches[tail] = True
                    todo.append(tail)
        return reaches
