"""What to expect of a model, memory and a stream of users: the real scheduler and pager in virtual time."""

from ..traffic import Arrival, Process
from .cost import Cost, Noisy, RooflineCost, roofline_cost
from .report import Distribution, Objective, Report, parse_objectives, summarize
from .serving import build_simulator, given_roofline
from .simulator import Outcome, Simulator, Stalled, VirtualClock
from .spill import SimulatedSpill
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
    "parse_objectives",
    "roofline_cost",
    "summarize",
]
