"""How models write tool calls and thoughts into their text: one small file per dialect."""
