"""Basics of this floor: the mesh, collectives, sharded parameters, random numbers, differentiable collectives."""
