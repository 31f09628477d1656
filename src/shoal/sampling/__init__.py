"""From logits to tokens: penalties, truncation, sampling, log-probabilities, counter-based random numbers.

``batch`` turns plan entries into arrays, ``csrc/sampler.cpp`` or its NumPy twin ``reference`` chooses the tokens, and
``results`` turns what they give back into the plan's values. ``rng`` is what randomness there is.
"""
