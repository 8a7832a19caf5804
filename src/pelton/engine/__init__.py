"""The engine: schedule, run, sample, commit, emit. Start at engine.py."""
