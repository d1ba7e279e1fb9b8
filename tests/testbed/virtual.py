"""A plan's constellation simulated in virtual time, in one process: the one that ``skymemory simulate`` runs."""

from skymemory_lab.sim.sky.run import VirtualConstellation as VirtualConstellation
