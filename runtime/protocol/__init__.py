"""The protocol between client and server: frames, their bytes, addresses and errors. Knows no socket and no engine."""
