"""Simulation of links with rates over real geometry: ``run(Scenario.read(path))`` gives the figures of every cell."""

from skymemory_lab.sim.sky.run import CellResult, Results, run
from skymemory_lab.sim.sky.scenario import Cell, Scenario, scenario_named, shipped

__all__ = ["Cell", "CellResult", "Results", "Scenario", "run", "scenario_named", "shipped"]
