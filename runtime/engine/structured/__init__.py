"""Structured outputs: grammars of clients' rules, their trial and compilation, masks for each step."""
