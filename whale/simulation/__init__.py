"""Simulation: the discrete-event run of a schedule over costs, without devices."""

from whale.simulation.costs import Costs
from whale.simulation.drawing import draw
from whale.simulation.figures import bubble, bubble_rate
from whale.simulation.simulate import simulate

__all__ = ["Costs", "bubble", "bubble_rate", "draw", "simulate"]
