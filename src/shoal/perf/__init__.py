"""How fast a machine could be at best, and how fast a step could be on it.

``ceilings`` measures memory and arithmetic; ``step_cost`` counts the bytes and operations of a step, purely from
sizes; ``paths`` says which arithmetic a configuration uses; ``roofline`` puts the three together into the least time a
step can take (Williams, Waterman & Patterson 2009).
"""
