"""The CPU backend: record, plan, replay in C++."""
