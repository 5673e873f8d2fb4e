"""The functions that a request passes on its way to the queue, and a token on its way back, do not become more.

A new function on one of these ways decides something, or several callers share it. `python -m tests.bench.hops --list`
names them all.
"""

from __future__ import annotations

from tests.support.trips import Trip, measure_trips

MOST_HOPS = {
    "frame to queue": 50,
    "chat to engine": 42,
    "chat to queue": 106,
    "token to frame": 16,
    "token to event": 17,
}


async def test_no_way_has_more_hops_than_before() -> None:
    trips = await measure_trips()
    assert trips.keys() == MOST_HOPS.keys()
    long = {name: trip for name, trip in trips.items() if len(trip.hops) > MOST_HOPS[name]}
    assert not long, _described(long)


def _described(trips: dict[str, Trip]) -> str:
    return "\n".join(f"{name}: {len(trip.hops)} hops, {', '.join(trip.hops)}" for name, trip in trips.items())
