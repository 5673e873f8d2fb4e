"""Markup of outputs: how a model writes reasoning and tool calls, its parser and its grammar."""
