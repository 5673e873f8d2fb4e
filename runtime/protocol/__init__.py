"""The protocol between client and server: frames, their encoding, addresses and errors; no sockets, no engine."""
