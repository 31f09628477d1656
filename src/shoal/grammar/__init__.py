"""Constraints on texts as sets of allowed tokens: a thin adapter over ``llguidance``.

``vocabulary`` is what is known of the tokens, ``compiler`` makes and keeps matchers, ``states`` follows each sequence
through its grammar and gives a step's masks.
"""
