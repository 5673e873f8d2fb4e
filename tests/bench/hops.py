"""Count the functions that a request passes from a socket to the scheduler's queue, and a token on its way back.

usage: python -m tests.bench.hops [--list]

A hop is a function of the project that calls another one on the way. Properties, constructors and comprehensions are
not counted. `tests/system/test_hops.py` keeps the numbers of hops from growing.
"""

from __future__ import annotations

import argparse
import asyncio

from tests.support.trips import measure_trips


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--list", action="store_true", help="print every function; hops begin with *")
    arguments = parser.parse_args()
    for name, trip in asyncio.run(measure_trips()).items():
        print(f"{name}: {len(trip.hops)} hops among {len(trip.functions)} functions")
        for function in trip.functions if arguments.list else ():
            print(f"  {'*' if function in trip.hops else ' '} {function}")


if __name__ == "__main__":
    main()
