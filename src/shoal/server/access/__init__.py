"""Who may use the server, and how much of it: API keys, their limits, and the checks in front of every request."""
