"""Scheduling policy and KV-memory bookkeeping: pure Python on the standard library.

No clock, arrays, threads, logging or I/O. Time is an argument, so the simulator and the tests run this
very code. See ``scheduler`` for the step loop's three verbs.
"""
