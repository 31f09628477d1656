"""Measuring Shoal: how fast, how far from what the machine allows, and where the time goes.

``work`` draws what is run, ``stopwatch`` times the parts of the engine's own step, ``engine`` runs rounds, ``summary``
makes numbers of them, ``machine`` says where it ran and whether anything disturbed it, ``neighbours`` disturbs it on
purpose. Nothing here talks to a terminal.
"""
