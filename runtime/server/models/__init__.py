"""The models of one server: their names, and the engine of each."""
