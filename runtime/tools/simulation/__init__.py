"""Simulations of a model, a machine and a stream of users, with the real scheduler in virtual time."""

from ..traffic import Arrival
from .build import build_simulator, given_roofline
from .cost import NoisyCost, RooflineCost, StepCost, roofline_cost
from .fleet import Fleet, FleetOptions
from .prediction import Speed, predict_speed
from .report import LatencyObjective, SimulationReport, parse_objectives, summarize
from .simulator import RequestOutcome, SimulatedSpill, SimulationStalled, Simulator, VirtualClock
from .workload import Workload, make_arrivals

__all__ = [
    "Arrival",
    "Fleet",
    "FleetOptions",
    "LatencyObjective",
    "NoisyCost",
    "RequestOutcome",
    "RooflineCost",
    "SimulatedSpill",
    "SimulationReport",
    "SimulationStalled",
    "Simulator",
    "Speed",
    "StepCost",
    "VirtualClock",
    "Workload",
    "build_simulator",
    "given_roofline",
    "make_arrivals",
    "parse_objectives",
    "predict_speed",
    "roofline_cost",
    "summarize",
]
