"""What to expect of a model, memory and a stream of users: the real scheduler and pager in virtual time."""

from .arrivals import Arrival, Process
from .cost import Cost, Noisy, RooflineCost, roofline_cost
from .report import Distribution, Objective, Report, parse_goodput, summarize
from .serving import build_simulator, given_roofline
from .simulator import Outcome, Simulator, Stalled, VirtualClock
from .spill import SimulatedSpill
from .traces import read_azure, read_mooncake
from .workload import Workload, make_arrivals

__all__ = [
    "Arrival",
    "Cost",
    "Distribution",
    "Noisy",
    "Objective",
    "Outcome",
    "Process",
    "Report",
    "RooflineCost",
    "SimulatedSpill",
    "Simulator",
    "Stalled",
    "VirtualClock",
    "Workload",
    "build_simulator",
    "given_roofline",
    "make_arrivals",
    "parse_goodput",
    "read_azure",
    "read_mooncake",
    "roofline_cost",
    "summarize",
]
