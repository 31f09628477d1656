"""From time stamps to the numbers people ask for. Standard library only; time is always an argument."""
