"""Load on a server over HTTP, and what came of it; for any server that speaks OpenAI's API.

arrivals   when requests are to be sent                      pure
workload   what they ask                                     pure
target     an address, and one streamed request to it
run        sends the workload at its times, or so many at once
report     from what happened to numbers                     pure
chart      throughput against latency, as a picture          pure
"""
