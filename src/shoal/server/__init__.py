"""The OpenAI-compatible HTTP API over one engine.

A request's way through here::

    app        routes; each is a few lines over what follows
    encoding   bytes to JSON and back, strictly
    requests   what a body may hold, field by field        (validation: a wrong one is an ApiError that names it)
    prepare    a valid body to prompts, parameters and engine requests
    answers    the engine's chunks to a completion or chat answer, whole or as a stream
    sse        a stream of answers on the wire; a reader that leaves aborts its request
    service    the model being served, and whether it can be

Whole answers and streams are made by the same code from the same chunks, so they cannot differ.
"""
