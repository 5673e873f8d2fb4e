"""The server's side of Quire's own protocol: connections, and the handling and writing of frames."""
